// SPDX-License-Identifier: MIT
// Method specs that cannot be used: what their errors tell.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "fathom/error.h"
#include "fathom/method.h"

namespace fathom {
namespace {

std::string UsageError(const std::string& spec) {
  try {
    ValidateMethodSpec(MethodSpec::Parse(spec));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << spec;
    return error.what();
  }
  return "";
}

TEST(MethodSpec, BadSpecsNameValueLimitAndRemedy) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"", {"name is missing"}},
      {"fathm:k=512", {"fathm", "valid: dense, double-sparsity, exact, fathom"}},
      {"fathom:k=36", {"k=36", "37.."}},
      {"fathom:k=abc", {"k=abc", "whole number"}},
      {"fathom:k=512x", {"k=512x"}},
      {"fathom:bits=0", {"bits=0", "1.."}},
      {"fathom:bits=nan", {"bits=nan"}},
      {"fathom:bits=1e9", {"bits=1e9"}},
      {"fathom:preset=paper,budget=0", {"budget=0", "1..1024"}},
      {"fathom:preset=paper,bits=28", {"bits", "preset=paper", "budget"}},
      {"fathom:budget=48", {"budget", "preset=paper", "bits"}},
      {"dense,exact", {"separated by spaces"}},
      {"fathom:preset=mine", {"preset=mine", "own|paper"}},
      {"fathom:basis=balance", {"basis=balance", "raw|klt"}},
      {"fathom:colour=red",
       {"no option 'colour'",
        "valid here: preset, bits, store, meanbits, weights, range, plan, basis, budgets, k, "}},
      {"dense:k=512", {"no option 'k'", "it takes none"}},
      {"fathom:k", {"'k' is not key=value"}},
      {"fathom:k=1,k=2", {"given twice"}},
      {"fathom:=3", {"not key=value"}},
  };
  for (const auto& [spec, parts] : cases) {
    const std::string message = UsageError(spec);
    for (const auto& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << spec << " -> " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
  EXPECT_EQ(UsageError("fathom:bits=28,k=512"), "");
  EXPECT_EQ(UsageError("fathom:preset=paper,budget=48,k=512"), "");
}

}  // namespace
}  // namespace fathom
