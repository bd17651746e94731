// SPDX-License-Identifier: MIT
// Steps of a session on a device, the attention of all layers, against Method::Attend over many
// steps: what the mirrors of the method's index and of the rows must follow.
#include <gtest/gtest.h>

#include <string>

#include "backend/cuda/cuda_backend.h"
#include "support/cuda_session.h"

namespace fathom::test {
namespace {

class CudaSession : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = ProbeCuda();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

bool Holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(CudaSession, BlockEnds) {
  SessionPair pair({"fathom:k=128,min=0"});
  pair.Prefill(256);
  pair.Steps(2);
  pair.Prefill(256 + 60, /*build=*/false);
  pair.Steps(7);  // the 4th of them ends a block
  pair.Prefill(256 + 2 * 64 - 1, /*build=*/false);
  pair.Steps(3);
  EXPECT_EQ(pair.counters().steps, 12);
  EXPECT_EQ(pair.counters().sparse_calls, pair.counters().calls);
  EXPECT_EQ(pair.n_recorded(), 1);
}

TEST_F(CudaSession, Shapes) {
  for (const SessionCase& c : {SessionCase{"fathom:k=100,min=0,bits=40,residual=off", 128, 1},
                               SessionCase{"fathom:k=100,min=0,meanbits=8,residual=mean", 128, 6},
                               SessionCase{"fathom:k=100,min=0,weights=center", 80, 16},
                               SessionCase{"fathom:k=100,min=0,residual=off", 256, 3},
                               SessionCase{"fathom:k=100,min=0,dense=1", 64, 1, 3}}) {
    SCOPED_TRACE(testing::Message() << c);
    SessionPair pair(c);
    pair.Prefill(318);
    pair.Steps(4);
    EXPECT_GT(pair.counters().sparse_calls, 0);
  }
}

// From the first token on: sinks and ring fill up by steps alone.
TEST_F(CudaSession, DenseSteps) {
  for (const char* spec : {"dense", "fathom", "sparq:k=128"}) {
    SessionPair pair({spec});
    pair.Steps(6);
    pair.Prefill(62, /*build=*/false);
    pair.Steps(4);
    EXPECT_EQ(pair.counters().steps, 10);
    EXPECT_EQ(pair.counters().sparse_calls, 0);
    EXPECT_EQ(pair.n_recorded(), 1);
  }
}

// More tokens than the ring holds.
TEST_F(CudaSession, DenseBeyondTheRing) {
  SessionPair pair({"dense", 64, 4, 1, 1536});
  pair.Prefill(1022, /*build=*/false);
  pair.Steps(4);
  pair.Prefill(1400, /*build=*/false);
  pair.Steps(2);
}

TEST_F(CudaSession, DenseUntilThereAreEnoughTokens) {
  SessionPair pair({"fathom:k=128,min=300"});
  pair.Prefill(298);
  pair.Steps(1);
  EXPECT_EQ(pair.counters().sparse_calls, 0);
  // No query of the prefill was sparse, so that there is nothing to fit one plan for all on.
  EXPECT_TRUE(Holds(pair.Step(), "plan=common"));
  pair.HostStepOfBoth();
  EXPECT_TRUE(Holds(pair.Step(), "plan=common"));
  pair.Prefill(380);
  pair.Steps(6);
  EXPECT_GT(pair.counters().sparse_calls, 0);
  pair.Truncate(290);
  pair.Steps(2);
  EXPECT_TRUE(Holds(
      [&] {
        pair.Prefill(300, /*build=*/false);
        return pair.Step();
      }(),
      "plan=common"));
}

// What was truncated is not seen again, and blocks that come in its place are.
TEST_F(CudaSession, Truncation) {
  SessionPair pair({"fathom:k=128,min=0"});
  pair.Prefill(290);
  pair.Prefill(400, /*build=*/false);
  pair.Steps(3);
  pair.Truncate(300);  // above what the index was made of: it is cut
  pair.ChangeFrom(300);
  pair.Prefill(383, /*build=*/false);
  pair.Steps(4);
  pair.Truncate(pair.n_tokens() - 2);  // no block less
  pair.ChangeFrom(pair.n_tokens());
  pair.Steps(2);
  pair.Truncate(256);  // below: it is made again
  pair.ChangeFrom(256);
  pair.Prefill(330);
  pair.Steps(2);
}

// Up to the last token of a context that is not a whole number of blocks.
TEST_F(CudaSession, EndOfTheContext) {
  SessionPair pair({"fathom:k=100,min=0", 64, 2, 2, 331});
  pair.Prefill(318);
  pair.Steps(13);
}

// An index that is made again has other statistics, codes and factors.
TEST_F(CudaSession, IndexMadeAgain) {
  SessionPair pair({"fathom:k=128,min=0"});
  pair.Prefill(256);
  pair.Steps(2);
  pair.Prefill(420);
  pair.Steps(3);
}

// A segment that came after the index was made has its own codec and tables.
TEST_F(CudaSession, SeveralCodecs) {
  SessionPair pair({"fathom:k=128,min=0,residual=block", 64, 2, 2, 4096 + 512});
  pair.Prefill(4032);
  pair.Steps(1);
  pair.Prefill(4096 + 62, /*build=*/false);
  pair.Steps(4);  // the 2nd of them ends the first block of the second segment
  EXPECT_EQ(pair.n_recorded(), 2);
  pair.Truncate(4090);
  pair.Steps(2);
}

TEST_F(CudaSession, TwoAtOnce) {
  SessionPair a({"fathom:k=128,min=0", 64, 4, 2, 512, 5});
  SessionPair b({"fathom:k=100,min=0,residual=off", 128, 2, 1, 512, 6});
  a.Prefill(318);
  b.Prefill(300);
  for (int i = 0; i < 4; ++i) {
    a.Steps(1);
    b.Steps(1);
  }
}

// Steps that the device cannot make are refused with the reason, and those between are right.
TEST_F(CudaSession, Refusals) {
  struct Refused {
    const char* spec;
    const char* why;
  };
  for (const Refused& r : {Refused{"fathom:k=128,min=0,plan=measured", "plan=common"},
                           {"fathom:k=128,min=0,basis=klt", "basis"},
                           {"fathom:k=128,min=0,values=lazy", "values=lazy"},
                           {"fathom:k=128,min=0,store=paper", "store=paper"},
                           {"fathom:k=128,min=0,preset=paper", "preset=paper"},
                           {"sparq:k=128,min=0", "no scan"}}) {
    SessionPair pair({r.spec});
    pair.Prefill(300);
    EXPECT_TRUE(Holds(pair.Step(), r.why)) << pair.Step();
    EXPECT_EQ(pair.counters().steps, 0);
  }
  SessionPair large({"fathom:k=4000,min=0", 64, 1, 1, 4600});
  large.Prefill(200);
  large.Steps(1);
  large.Prefill(4400);
  EXPECT_TRUE(Holds(large.Step(), "k=4000")) << large.Step();
  large.HostStepOfBoth();
  EXPECT_TRUE(Holds(large.Step(), "k=4000"));
}

// Steps by the method itself in between leave rows and blocks that the device must take over.
TEST_F(CudaSession, TakesTurnsWithTheMethod) {
  SessionPair pair({"fathom:k=128,min=0"});
  pair.Prefill(316);
  pair.Steps(2);
  for (int i = 0; i < 4; ++i) pair.HostStepOfBoth();
  pair.Steps(2);
}

TEST_F(CudaSession, MemoryThatCannotBeRegistered) {
  int held = 0;
  cuda::HostPinner pinner;
  pinner.begin = [] { return std::string(); };
  pinner.pin = [&](std::byte*, std::size_t) {
    return std::string(++held < 3 ? "" : "not allowed");
  };
  pinner.unpin = [&](std::byte*) { --held; };
  SessionPair pair({"fathom:k=128,min=0"}, pinner);
  pair.Prefill(300);
  EXPECT_TRUE(Holds(pair.Step(), "not allowed")) << pair.Step();
  EXPECT_TRUE(Holds(pair.Step(), "ulimit -l")) << pair.Step();
  EXPECT_EQ(held, 1);  // that was not registered
  pair.HostStepOfBoth();
}

}  // namespace
}  // namespace fathom::test
