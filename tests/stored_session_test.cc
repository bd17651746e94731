// SPDX-License-Identifier: MIT
// Sessions that are kept on disk, with the bundled model: what comes back is what was saved, goes
// on as if it had never been away, and is refused where it could mislead.
#include <gtest/gtest.h>

#include <dirent.h>

#include <filesystem>
#include <fstream>

#include "archive/archive_file.h"
#include "archive/manifest.h"
#include "fathom/fathom.h"
#include "support/session_script.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

class StoredSessionTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    model = test::ScriptModel();
    text = test::ScriptText(*model);
  }
  static void TearDownTestSuite() { model.reset(); }

  static SessionOptions Options(const std::string& method = test::kScriptMethod,
                                std::int64_t ctx = 6144) {
    SessionOptions options = test::ScriptOptions();
    options.method = method;
    options.ctx_size = ctx;
    options.chunk = 512;
    options.n_threads = 2;
    return options;
  }
  static std::span<const Token> Part(std::int64_t first, std::int64_t n) {
    return std::span(text).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n));
  }
  static std::vector<float> Copy(std::span<const float> x) { return {x.begin(), x.end()}; }

  // Saves a session of n tokens, with its index.
  void Save(const std::string& name, std::int64_t n,
            const std::string& method = test::kScriptMethod) {
    StoredSession stored(folder_, name, model);
    const auto session = stored.Resume(Options(method));
    session->Prefill(Part(0, n));
    session->BuildIndex();
    stored.Save(*session);
  }

  // The error of resuming, empty if there is none.
  std::string ResumeError(const std::string& name, ErrorCode code,
                          const SessionOptions& options = Options()) {
    try {
      StoredSession stored(folder_, name, model);
      const auto session = stored.Resume(options);
      stored.WaitVerified();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "";
  }

  const test::TempDir dir_;
  SessionFolder folder_ = SessionFolder(dir_.path() / "sessions");
  static std::shared_ptr<const Model> model;
  static std::vector<Token> text;
};
std::shared_ptr<const Model> StoredSessionTest::model;
std::vector<Token> StoredSessionTest::text;

TEST_F(StoredSessionTest, RoundTripsOfAllSizes) {
  // Blocks, the shortest that is indexed (128), and a segment of 4,096 tokens, each with
  // neighbours.
  for (const std::int64_t n : {0, 1, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 4160}) {
    SCOPED_TRACE(n);
    const std::string name = "of " + std::to_string(n);
    Session whole(model, Options());
    whole.Prefill(Part(0, n));
    whole.BuildIndex();
    {
      StoredSession stored(folder_, name, model);
      const auto session = stored.Resume(Options());
      session->Prefill(Part(0, n));
      session->BuildIndex();
      stored.Save(*session);
    }
    StoredSession stored(folder_, name, model);
    const auto session = stored.Resume(Options());
    EXPECT_TRUE(stored.WaitVerified());
    ASSERT_EQ(session->n_tokens(), n);
    EXPECT_EQ(stored.tokens(), std::vector<Token>(text.begin(), text.begin() + n));
    EXPECT_EQ(session->method().MemoryBytes(), whole.method().MemoryBytes());
    EXPECT_EQ(Copy(session->logits()), Copy(whole.logits()));
    // With no new token, and with some.
    if (n > 0) {
      EXPECT_EQ(Generate(*session, {16, {}}).tokens, Generate(whole, {16, {}}).tokens);
    }
    session->Truncate(n);
    whole.Truncate(n);
    session->Prefill(Part(n, 70));
    whole.Prefill(Part(n, 70));
    EXPECT_EQ(Copy(session->logits()), Copy(whole.logits()));
    EXPECT_EQ(Generate(*session, {16, {}}).tokens, Generate(whole, {16, {}}).tokens);
  }
}

TEST_F(StoredSessionTest, EveryMethodGoesOn) {
  for (const std::string& method : std::vector<std::string>{
           "dense", "exact:k=96,min=128", "fathom:preset=paper,budget=48,k=96,min=128",
           "fathom:bits=28,k=96,min=128,basis=klt,residual=mean",
           "fathom:bits=20,k=96,min=128,values=lazy",
           "fathom:bits=28,k=96,min=128,plan=measured,store=paper", "quest:k=96,min=128",
           "sparq:k=96,min=128"}) {
    SCOPED_TRACE(method);
    const std::string name = "method " + std::to_string(method.size()) + method.substr(0, 4);
    Save(name, 1500, method);
    Session whole(model, Options(method));
    whole.Prefill(Part(0, 1500));
    whole.BuildIndex();
    StoredSession stored(folder_, name, model);
    SessionOptions options = Options("");
    const auto session = stored.Resume(options);
    EXPECT_EQ(session->method().spec(), whole.method().spec());
    session->BuildIndex();
    session->Prefill(Part(1500, 10));
    whole.Prefill(Part(1500, 10));
    EXPECT_EQ(Generate(*session, {24, {}}).tokens, Generate(whole, {24, {}}).tokens);
  }
}

TEST_F(StoredSessionTest, TenCyclesEqualOneSession) {
  Session whole(model, Options());
  for (int cycle = 0; cycle < 10; ++cycle) {
    SCOPED_TRACE(cycle);
    StoredSession stored(folder_, "cycles", model);
    const auto session = stored.Resume(Options());
    for (Session* s : {session.get(), &whole}) {
      ASSERT_EQ(s->n_tokens(), whole.n_tokens());
      s->Prefill(Part(cycle * 200, 200 + cycle));
      s->BuildIndex();
    }
    const auto answer = Generate(*session, {8, {}}).tokens;
    EXPECT_EQ(answer, Generate(whole, {8, {}}).tokens);
    ASSERT_EQ(session->n_tokens(), whole.n_tokens());
    stored.Save(*session);
    folder_.Verify("cycles");
  }
  // Few files, although there were many saves.
  EXPECT_LT(std::distance(fs::directory_iterator(folder_.path() / "cycles"), {}), 14);
}

TEST_F(StoredSessionTest, TruncationForgets) {
  Save("long", 2000);
  for (const std::int64_t n : {1990, 1984, 1300, 130, 64, 1, 0}) {
    SCOPED_TRACE(n);
    folder_.Truncate("long", n);
    folder_.Verify("long");
    EXPECT_EQ(folder_.Info("long").n_tokens, n);
    StoredSession stored(folder_, "long", model);
    const auto session = stored.Resume(Options());
    ASSERT_EQ(session->n_tokens(), n);
    Session whole(model, Options());
    whole.Prefill(Part(0, 2000));
    whole.BuildIndex();
    whole.Truncate(n);
    whole.Prefill(Part(n, 100));
    session->Prefill(Part(n, 100));
    EXPECT_EQ(Copy(session->logits()), Copy(whole.logits()));
    whole.BuildIndex();
    session->BuildIndex();
    EXPECT_EQ(Generate(*session, {12, {}}).tokens, Generate(whole, {12, {}}).tokens);
  }
}

TEST_F(StoredSessionTest, TruncatedThenGrownAnotherWay) {
  Save("a", 700);
  std::vector<Token> other(text.begin() + 2000, text.begin() + 2400);
  {
    StoredSession stored(folder_, "a", model);
    const auto session = stored.Resume(Options());
    session->Truncate(333);
    session->Prefill(other);
    stored.Save(*session);
  }
  folder_.Verify("a");
  StoredSession stored(folder_, "a", model);
  const auto session = stored.Resume(Options());
  Session whole(model, Options());
  whole.Prefill(Part(0, 700));
  whole.Truncate(333);
  whole.Prefill(other);
  EXPECT_EQ(Copy(session->logits()), Copy(whole.logits()));
  session->BuildIndex();
  whole.BuildIndex();
  EXPECT_EQ(Generate(*session, {12, {}}).tokens, Generate(whole, {12, {}}).tokens);
}

TEST_F(StoredSessionTest, ForksShareAndDoNotDisturb) {
  Save("a", 1200);
  const std::int64_t alone = folder_.Bytes();
  folder_.Fork("a", "b");
  EXPECT_LT(folder_.Bytes() - alone, 100000);
  EXPECT_GT(folder_.Info("b").shared_bytes, 1200 * 6 * 2 * 512);
  {
    StoredSession stored(folder_, "b", model);
    const auto session = stored.Resume(Options());
    session->Prefill(Part(1200, 300));
    stored.Save(*session);
  }
  EXPECT_EQ(folder_.Info("a").n_tokens, 1200);
  EXPECT_EQ(folder_.Info("b").n_tokens, 1500);
  folder_.Remove("a");
  folder_.Verify("b");
  StoredSession stored(folder_, "b", model);
  EXPECT_EQ(stored.Resume(Options())->n_tokens(), 1500);
  EXPECT_THROW(folder_.Fork("a", "c"), Error);
  EXPECT_THROW(folder_.Fork("b", "b"), Error);
}

TEST_F(StoredSessionTest, ExportedAndImported) {
  Save("a", 500);
  const fs::path file = dir_.path() / "a.tar";
  folder_.Export("a", file);
  EXPECT_THROW(folder_.Export("a", file), Error);
  folder_.Remove("a");
  folder_.Import(file, "b");
  folder_.Verify("b");
  StoredSession stored(folder_, "b", model);
  EXPECT_EQ(stored.Resume(Options())->n_tokens(), 500);
  EXPECT_THROW(folder_.Import(file, "b"), Error);
  // Cut off, damaged and foreign files.
  fs::resize_file(file, fs::file_size(file) / 2);
  EXPECT_THROW(folder_.Import(file, "c"), Error);
  EXPECT_THROW(folder_.Import(FATHOM_SOURCE_DIR "/README.md", "c"), Error);
  EXPECT_FALSE(folder_.Has("c"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(StoredSessionTest, OneWriterManyReaders) {
  Save("a", 200);
  StoredSession stored(folder_, "a", model);
  const auto session = stored.Resume(Options());
  EXPECT_EQ(folder_.Info("a").owner, getpid());
  const std::string error = ResumeError("a", ErrorCode::kUsage);
  EXPECT_NE(error.find("in use by process " + std::to_string(getpid())), std::string::npos)
      << error;
  EXPECT_THROW(folder_.Truncate("a", 10), Error);
  EXPECT_THROW(folder_.Remove("a"), Error);
  folder_.Verify("a");
  folder_.Fork("a", "b");
  EXPECT_EQ(folder_.List().size(), 2U);
}

TEST_F(StoredSessionTest, WhatWasNeverSavedIsNoSession) {
  {
    StoredSession stored(folder_, "a", model);
    const auto session = stored.Resume(Options());
    session->Prefill(Part(0, 10));
    EXPECT_FALSE(folder_.Has("a"));
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(StoredSessionTest, FlippedBitsAndCutFilesAreRefused) {
  Save("a", 4200);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder_.path() / "a")) {
    if (entry.path().filename() != "lock") files.push_back(entry.path());
  }
  EXPECT_EQ(files.size(), 5U);  // manifest, rows, queries, pieces, state
  for (const fs::path& file : files) {
    SCOPED_TRACE(file.filename().string());
    const auto size = static_cast<std::int64_t>(fs::file_size(file));
    for (const std::int64_t at : {std::int64_t{3}, size / 3, size - 1}) {
      const auto flip = [&] {
        std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
        f.seekg(at);
        const int byte = f.get();
        f.seekp(at);
        f.put(static_cast<char>(byte ^ 4));
      };
      flip();
      EXPECT_NE(ResumeError("a", ErrorCode::kCorrupt), "") << at;
      EXPECT_THROW(folder_.Verify("a"), Error) << at;
      flip();
    }
    fs::copy(file, dir_.path() / "whole");
    fs::resize_file(file, static_cast<std::uintmax_t>(size - 2));  // a manifest ends in a line feed
    EXPECT_NE(ResumeError("a", ErrorCode::kCorrupt), "");
    fs::resize_file(file, 0);
    EXPECT_NE(ResumeError("a", ErrorCode::kCorrupt), "");
    fs::rename(dir_.path() / "whole", file);
    EXPECT_EQ(ResumeError("a", ErrorCode::kCorrupt), "");
  }
  fs::remove(files.front().parent_path() / "rows-1");
  EXPECT_NE(ResumeError("a", ErrorCode::kIo).find("rows-1"), std::string::npos);
}

// Changes the manifest and gives it the checksum that belongs to it.
class StoredSessionForged : public StoredSessionTest {
 protected:
  template <typename Fn>
  std::string ErrorOf(const Fn& change, ErrorCode code) {
    Save("a", 200);
    const fs::path session = folder_.path() / "a";
    Manifest manifest = ReadManifest(session);
    change(manifest);
    WriteManifest(session, manifest);
    const std::string error = ResumeError("a", code);
    folder_.Remove("a");
    return error;
  }
};

TEST_F(StoredSessionForged, AnotherModelIsRefusedWithTheReason) {
  const auto another = [](const char* key, const char* value) {
    return [=](Manifest& m) { m.fingerprint[key] = value; };
  };
  std::string error = ErrorOf(another("model", "00"), ErrorCode::kUsage);
  EXPECT_NE(error.find("another model"), std::string::npos) << error;
  EXPECT_NE(error.find(model->fingerprint()), std::string::npos) << error;
  error = ErrorOf(another("rope", "neox, base 500000"), ErrorCode::kUsage);
  EXPECT_NE(error.find("neox, base 500000"), std::string::npos) << error;
  error = ErrorOf(another("rows", "bf16"), ErrorCode::kUsage);
  EXPECT_NE(error.find("bf16"), std::string::npos) << error;
  error = ErrorOf(another("block", "128"), ErrorCode::kUsage);
  EXPECT_NE(error.find("128"), std::string::npos) << error;
  error = ErrorOf(another("statistics", "of 5 tokens, 7"), ErrorCode::kUsage);
  EXPECT_NE(error.find("of 5 tokens, 7, not own"), std::string::npos) << error;
  error = ErrorOf([](Manifest& m) { m.fingerprint.erase("rope"); }, ErrorCode::kUsage);
  EXPECT_NE(error.find("nothing"), std::string::npos) << error;
}

TEST_F(StoredSessionForged, AnIndexOfAnotherCodecIsRefused) {
  // The manifest claims a method whose planes are of another codec than the state has.
  Session paper(model, Options("fathom:preset=paper,budget=48,k=64,min=128"));
  const std::string error =
      ErrorOf([&](Manifest& m) { m.method = paper.method().spec(); }, ErrorCode::kCorrupt);
  EXPECT_EQ(error, "") << "with another --method the index is made anew";
  Save("b", 200);
  const fs::path session = folder_.path() / "b";
  Manifest manifest = ReadManifest(session);
  manifest.method = paper.method().spec();
  WriteManifest(session, manifest);
  const std::string found = ResumeError("b", ErrorCode::kCorrupt, Options(""));
  EXPECT_NE(found.find("damaged"), std::string::npos) << found;
}

TEST_F(StoredSessionTest, NewerVersionsAreRefused) {
  Save("a", 100);
  const fs::path manifest = folder_.path() / "a" / kManifestName;
  std::ifstream in(manifest);
  std::string content((std::istreambuf_iterator<char>(in)), {});
  const auto at = content.find("\"version\": 1");
  ASSERT_NE(at, std::string::npos);
  content.replace(at, 12, "\"version\": 2");
  std::ofstream(manifest) << content;
  const std::string error = ResumeError("a", ErrorCode::kUnsupported);
  EXPECT_NE(error.find("version 2"), std::string::npos) << error;
  std::vector<std::string> unreadable;
  EXPECT_TRUE(folder_.List(&unreadable).empty());
  EXPECT_EQ(unreadable, std::vector<std::string>{"a"});
}

TEST_F(StoredSessionTest, ContextsThatAreTooSmallAreRefused) {
  Save("a", 900);
  const std::string error = ResumeError("a", ErrorCode::kUsage, Options(test::kScriptMethod, 512));
  EXPECT_NE(error.find("900"), std::string::npos) << error;
  EXPECT_NE(error.find("512"), std::string::npos) << error;
}

TEST_F(StoredSessionTest, BytesOnDiskAreTheClosedForm) {
  for (const std::int64_t n : {64, 1000, 4096, 5000}) {
    const std::string name = std::to_string(n);
    Save(name, n);
    const Manifest manifest = ReadManifest(folder_.path() / name);
    const ModelInfo& info = model->info();
    const std::int64_t blocks = (n + 63) / 64;
    EXPECT_EQ(manifest.Find(ArchiveKind::kRows)->digest.bytes,
              4096 + RowStore::Bytes(info.n_layers, info.heads, blocks * 64));
    const ArchivedFile* pieces = manifest.Find(ArchiveKind::kPieces);
    IndexShape shape;
    shape.head_dim = info.heads.head_dim;
    ASSERT_EQ(pieces != nullptr, n >= 4096);
    if (pieces != nullptr) {
      EXPECT_EQ(pieces->digest.bytes,
                4096 + info.n_layers * info.heads.n_kv_heads * shape.SegmentBytes());
    }
    const std::int64_t most =
        StoredSession::DiskBytes(info, MethodSpec::Parse(test::kScriptMethod), n);
    EXPECT_LE(manifest.Bytes(), most);
    EXPECT_GE(manifest.Bytes(), most - (std::int64_t{8} << 20));
  }
}

std::int64_t OpenFiles() { return std::distance(fs::directory_iterator("/proc/self/fd"), {}); }

std::int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * 4096;
}

TEST_F(StoredSessionTest, TwoHundredSessionsUnderABudget) {
  SessionFolder folder(dir_.path() / "many", std::int64_t{24} << 20);
  SessionOptions options = Options(test::kScriptMethod, 512);
  std::int64_t files_before = 0, bytes_before = 0;
  std::size_t evicted = 0;
  for (int i = 0; i < 200; ++i) {
    const std::string name = std::to_string(i);
    {
      StoredSession stored(folder, name, model);
      stored.CheckSpace(MethodSpec::Parse(test::kScriptMethod), 150);
      evicted += stored.evicted().size();
      const auto session = stored.Resume(options);
      session->Prefill(Part(i, 150));
      session->BuildIndex();
      stored.Save(*session);
      evicted += stored.evicted().size();
    }
    StoredSession stored(folder, name, model);
    const auto session = stored.Resume(options);
    ASSERT_TRUE(stored.WaitVerified());
    ASSERT_EQ(session->n_tokens(), 150);
    session->Decode(1);
    if (i == 20) {
      files_before = OpenFiles();
      bytes_before = ResidentBytes();
    }
  }
  EXPECT_LE(OpenFiles(), files_before);
  EXPECT_LT(ResidentBytes() - bytes_before, std::int64_t{32} << 20);
  EXPECT_LE(folder.Bytes(), folder.budget_bytes());
  EXPECT_GT(evicted, 150U);
  // The newest are there, and accounting is that of the files.
  EXPECT_TRUE(folder.Has("199"));
  EXPECT_EQ(folder.Bytes(), SessionFolder(folder.path()).Bytes());
  const std::size_t left = folder.List().size();
  EXPECT_EQ(left + evicted, 200U);
  EXPECT_EQ(static_cast<std::size_t>(std::distance(fs::directory_iterator(folder.path()), {})),
            left);
}

TEST_F(StoredSessionTest, ABudgetThatIsTooSmallIsSaidBeforehand) {
  SessionFolder folder(dir_.path() / "small", 1 << 20);
  StoredSession stored(folder, "a", model);
  try {
    stored.CheckSpace(MethodSpec::Parse(test::kScriptMethod), 5000);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("budget of 1048576"), std::string::npos)
        << error.what();
  }
  SessionFolder unlimited(dir_.path() / "large");
  StoredSession huge(unlimited, "a", model);
  try {
    huge.CheckSpace(MethodSpec::Parse("dense"), std::int64_t{1} << 40);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNoMemory);
    EXPECT_NE(std::string(error.what()).find("bytes on disk"), std::string::npos) << error.what();
  }
  EXPECT_THROW(stored.CheckSpace(MethodSpec::Parse(test::kScriptMethod), std::int64_t{1} << 40),
               Error);
}

}  // namespace
}  // namespace fathom
