// SPDX-License-Identifier: MIT
// Every backend against `ref`: prefill.
#include <gtest/gtest.h>

#include "support/backend_cases.h"
#include "support/prefill_cases.h"

namespace fathom::test {
namespace {

class BackendPrefill : public BackendTest {
 protected:
  PrefillChecks checks() const {
    return PrefillChecks([this](int threads) { return WithThreads(threads); });
  }
};

FATHOM_PREFILL_TESTS(TEST_P, BackendPrefill, checks());

FATHOM_TEST_ALL_BACKENDS(BackendPrefill);

}  // namespace
}  // namespace fathom::test
