// SPDX-License-Identifier: MIT
// Sessions that were written before must stay readable: tests/data/session-v1.tar is one of a tiny
// random model, written by the first version of the format.
//
// FATHOM_WRITE_FIXTURE=FILE writes such a file, for a new version.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <vector>

#include "fathom/fathom.h"
#include "support/gguf_fixture.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

constexpr const char* kFixture = FATHOM_SOURCE_DIR "/tests/data/session-v1.tar";
constexpr std::int64_t kTokens = 150;

std::vector<Token> Tokens() {
  std::vector<Token> tokens(kTokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<Token>(i * 7 % 256);
  return tokens;
}

SessionOptions Options() {
  SessionOptions options;
  options.ctx_size = 512;
  options.method = "fathom:bits=28,k=64,min=128";
  options.n_threads = 1;
  return options;
}

std::shared_ptr<const Model> TinyModelOf(const test::TempDir& dir) {
  const std::string path = (dir.path() / "tiny.gguf").string();
  EXPECT_TRUE(testing::WriteTinyModel({}, path));
  return Model::Open(path);
}

TEST(SessionFormat, ReadsVersion1) {
  const test::TempDir dir;
  const auto model = TinyModelOf(dir);
  SessionFolder folder(dir.path() / "sessions");
  if (const char* file = std::getenv("FATHOM_WRITE_FIXTURE"); file != nullptr) {
    StoredSession stored(folder, "written", model);
    const auto session = stored.Resume(Options());
    session->Prefill(Tokens());
    session->BuildIndex();
    stored.Save(*session);
    folder.Export("written", file);
  }
  folder.Import(kFixture, "old");
  EXPECT_NO_THROW(folder.Verify("old"));
  EXPECT_EQ(folder.Info("old").n_tokens, kTokens);
  StoredSession stored(folder, "old", model);
  EXPECT_EQ(stored.tokens(), Tokens());
  const auto session = stored.Resume(Options());
  EXPECT_TRUE(stored.WaitVerified());

  // What it holds is what the session would be now, up to the rounding of another processor.
  Session now(model, Options());
  now.Prefill(Tokens());
  now.BuildIndex();
  EXPECT_EQ(session->method().MemoryBytes(), now.method().MemoryBytes());
  ASSERT_EQ(session->logits().size(), now.logits().size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < now.logits().size(); ++i) {
    difference += std::pow(session->logits()[i] - now.logits()[i], 2);
    size += std::pow(now.logits()[i], 2);
  }
  EXPECT_LT(difference, 1e-4 * size);
  session->Decode(3);
  now.Decode(3);
  EXPECT_EQ(session->n_tokens(), kTokens + 1);
  stored.Save(*session);
  EXPECT_NO_THROW(folder.Verify("old"));
}

}  // namespace
}  // namespace fathom
