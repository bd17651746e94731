// SPDX-License-Identifier: MIT
// What the step bench makes of method specs: nothing is measured under the name of something else.
#include <gtest/gtest.h>

#include <string>

#include "device/bench_index.h"
#include "fathom/error.h"

namespace fathom::cuda {
namespace {

constexpr std::int32_t kDim = 128;

ErrorCode CodeOf(const std::string& spec) {
  try {
    ParseBenchMethod(spec, kDim);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(spec.substr(0, spec.find(':'))), std::string::npos)
        << error.what();
    return error.code();
  }
  ADD_FAILURE() << spec << " was taken";
  return ErrorCode::kInternal;
}

TEST(CudaBenchMethod, Kinds) {
  EXPECT_EQ(ParseBenchMethod("dense", kDim).kind, BenchMethod::Kind::kDense);
  const BenchMethod own = ParseBenchMethod("fathom:bits=19.5", kDim);
  EXPECT_EQ(own.kind, BenchMethod::Kind::kMean);
  EXPECT_EQ(own.bits, 19.5);
  EXPECT_TRUE(own.residual);
  EXPECT_FALSE(ParseBenchMethod("fathom:residual=off", kDim).residual);
  const BenchMethod paper = ParseBenchMethod("fathom:preset=paper,budget=40", kDim);
  EXPECT_EQ(paper.kind, BenchMethod::Kind::kPaper);
  EXPECT_EQ(paper.budget, 40);
  EXPECT_FALSE(paper.residual);
  EXPECT_EQ(ParseBenchMethod("exact", kDim).chunk, 1);
  EXPECT_EQ(ParseBenchMethod("landmark", kDim).chunk, 8);
}

TEST(CudaBenchMethod, Labels) {
  const auto shape = [](const char* spec) { return ParseBenchMethod(spec, kDim).labels; };
  EXPECT_EQ(shape("sparq:r=16").n_channels, 16);
  EXPECT_EQ(shape("sparq").layout, LabelLayout::kChannels);
  EXPECT_EQ(shape("sparq").table_width, kDim);  // the query chooses among all
  EXPECT_EQ(shape("double-sparsity:c=20").n_channels, 20);
  EXPECT_EQ(shape("double-sparsity:c=20").table_width, 24);  // whole units of eight
  EXPECT_EQ(shape("loki:r=32").layout, LabelLayout::kTokens);
  EXPECT_EQ(shape("thumbnail").planes, 2);
  EXPECT_EQ(shape("full4").n_channels, kDim);
  EXPECT_EQ(ParseBenchMethod("sparq:r=128", 64).labels.n_channels, 64);
}

TEST(CudaBenchMethod, WhatTheDeviceDoesNotDoIsRefused) {
  for (const char* spec :
       {"fathom:store=paper", "fathom:plan=measured", "fathom:meanbits=8", "fathom:residual=mean",
        "fathom:values=lazy", "fathom:basis=balanced", "fathom:preset=paper,residual=block",
        "thumbnail:planes=3", "thumbnail:rule=ffd", "sparq:rule=author", "sparq:channels=head",
        "double-sparsity:labels=fp16,rule=author", "landmark:outliers=48", "h2o", "random"}) {
    EXPECT_EQ(CodeOf(spec), ErrorCode::kUnsupported) << spec;
  }
}

TEST(CudaBenchMethod, WhatNobodyDoesIsAnError) {
  EXPECT_EQ(CodeOf("fathom:bits=0"), ErrorCode::kUsage);
  EXPECT_EQ(CodeOf("fathom:colour=red"), ErrorCode::kUsage);
  EXPECT_EQ(CodeOf("nonsense"), ErrorCode::kUsage);
}

}  // namespace
}  // namespace fathom::cuda
