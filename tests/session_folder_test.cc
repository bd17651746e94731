// SPDX-License-Identifier: MIT
// Folders of sessions without a model: names, manifests that lie, archives that reach elsewhere,
// locks of other processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "archive/archive_file.h"
#include "archive/manifest.h"
#include "archive/session_lock.h"
#include "fathom/error.h"
#include "fathom/session_folder.h"
#include "support/error_of.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using test::ErrorOf;

// A session of n tokens, one layer and one KV head of 16 channels, without content.
Manifest WriteSession(const fs::path& session, std::int64_t n) {
  fs::create_directories(session);
  Manifest m;
  m.fingerprint["model"] = "none";
  m.model = "a model";
  m.method = "dense";
  m.heads = {2, 1, 16};
  m.n_layers = 1;
  m.n_tokens = m.saved_tokens = n;
  m.created = 1;
  const auto add = [&](ArchiveKind kind, std::int64_t bytes) {
    ArchivedFile file = {m.next_number++, kind, {}, 0, kind == ArchiveKind::kRows ? n : 0};
    ArchiveWriter writer(session / file.name(), kind);
    writer.Append(std::vector<std::byte>(static_cast<std::size_t>(bytes)));
    file.digest = writer.Finish();
    m.files.push_back(file);
  };
  if (n > 0) add(ArchiveKind::kRows, (n + 63) / 64 * 64 * 64);
  add(ArchiveKind::kState, 100);
  WriteManifest(session, m);
  return m;
}

class SessionFolderTest : public testing::Test {
 protected:
  const test::TempDir dir_;
  SessionFolder folder_ = SessionFolder(dir_.path() / "sessions");

  fs::path Path(const std::string& name) const { return folder_.path() / name; }
};

TEST_F(SessionFolderTest, NamesAreChecked) {
  for (const std::string& good :
       std::vector<std::string>{"a", "a b", "Zürich", "x.y", "x-1", std::string(120, 'x')}) {
    EXPECT_NO_THROW(SessionFolder::CheckName(good)) << good;
  }
  for (const std::string& bad : std::vector<std::string>{
           std::string(), std::string("a/b"), std::string("../x"), std::string("."),
           std::string(".hidden"), std::string("a\\b"), std::string("a\nb"), std::string("a\0b", 3),
           std::string("\x7f"), std::string(121, 'x')}) {
    const std::string error = ErrorOf(ErrorCode::kUsage, [&] { SessionFolder::CheckName(bad); });
    EXPECT_EQ(error.find('\n'), std::string::npos);
    EXPECT_NE(error.find("cannot name a session"), std::string::npos);
  }
}

TEST_F(SessionFolderTest, DefaultPathFollowsTheEnvironment) {
  setenv("FATHOM_HOME", "/f", 1);
  setenv("XDG_DATA_HOME", "/x", 1);
  EXPECT_EQ(SessionFolder::DefaultPath(), "/f/sessions");
  unsetenv("FATHOM_HOME");
  EXPECT_EQ(SessionFolder::DefaultPath(), "/x/fathom/sessions");
  unsetenv("XDG_DATA_HOME");
  const char* inherited_home = std::getenv("HOME");
  const std::string home = inherited_home == nullptr ? "" : inherited_home;
  setenv("HOME", "/h", 1);
  EXPECT_EQ(SessionFolder::DefaultPath(), "/h/.local/share/fathom/sessions");
  unsetenv("HOME");
  ErrorOf(ErrorCode::kUsage, [] { SessionFolder::DefaultPath(); });
  setenv("HOME", home.c_str(), 1);
}

TEST_F(SessionFolderTest, ListsWhatIsThere) {
  EXPECT_TRUE(folder_.List().empty());
  WriteSession(Path("b"), 100);
  WriteSession(Path("a"), 0);
  fs::create_directories(Path("never saved"));
  const auto list = folder_.List();
  ASSERT_EQ(list.size(), 2U);
  EXPECT_EQ(list[0].name, "a");
  EXPECT_EQ(list[1].n_tokens, 100);
  EXPECT_EQ(list[1].owner, 0);
  EXPECT_EQ(list[1].model, "a model");
  const std::string error = ErrorOf(ErrorCode::kUsage, [&] { folder_.Info("c"); });
  EXPECT_NE(error.find("there are: a, b"), std::string::npos) << error;
}

TEST_F(SessionFolderTest, ForkTruncateRemove) {
  WriteSession(Path("a"), 100);
  folder_.Fork("a", "b");
  folder_.Verify("b");
  folder_.Truncate("b", 64);
  EXPECT_EQ(folder_.Info("b").n_tokens, 64);
  EXPECT_EQ(folder_.Info("a").n_tokens, 100);
  ErrorOf(ErrorCode::kUsage, [&] { folder_.Truncate("b", 65); });
  ErrorOf(ErrorCode::kUsage, [&] { folder_.Truncate("b", -1); });
  folder_.Truncate("b", 0);
  folder_.Verify("b");
  folder_.Remove("a");
  EXPECT_FALSE(folder_.Has("a"));
  folder_.Verify("b");
  ErrorOf(ErrorCode::kUsage, [&] { folder_.Remove("a"); });
}

TEST_F(SessionFolderTest, LeftoversOfDeadProcessesGo) {
  WriteSession(Path("a"), 10);
  WriteSession(Path(".new-1-1-1"), 10);
  WriteSession(Path(".removed-1-1-1"), 10);
  std::ofstream(Path("a") / "rows-99") << "half a file";
  folder_.Fork("a", "b");
  EXPECT_FALSE(fs::exists(Path(".new-1-1-1")));
  EXPECT_FALSE(fs::exists(Path(".removed-1-1-1")));
  EXPECT_FALSE(fs::exists(Path("b") / "rows-99"));
  // Those of a process that lives stay.
  WriteSession(Path(".new-1-1-2"), 10);
  const SessionLock lock(Path(".new-1-1-2"));
  folder_.Remove("b");
  EXPECT_TRUE(fs::exists(Path(".new-1-1-2")));
}

// Nobody takes what another is making for a leftover, and nobody sees half a session.
TEST_F(SessionFolderTest, ManyAtOnce) {
  WriteSession(Path("a"), 100);
  constexpr int kRounds = 60;
  std::atomic<int> done = 0;
  std::vector<std::string> errors;
  std::mutex errors_mutex;
  const auto guarded = [&](const std::function<void(SessionFolder&)>& work) {
    try {
      SessionFolder folder(folder_.path());
      work(folder);
    } catch (const Error& error) {
      const std::lock_guard lock(errors_mutex);
      errors.emplace_back(error.what());
    }
  };
  std::vector<std::thread> threads;
  for (const std::string prefix : {"x", "y", "z"}) {
    threads.emplace_back([&, prefix] {
      guarded([&](SessionFolder& folder) {
        for (int i = 0; i < kRounds; ++i) {
          const std::string name = prefix + std::to_string(i);
          folder.Fork("a", name);
          folder.Verify(name);
          folder.Remove(name);
        }
      });
      ++done;
    });
  }
  guarded([&](SessionFolder& folder) {
    while (done < 3) {
      std::vector<std::string> unreadable;
      folder.List(&unreadable);
      const std::lock_guard lock(errors_mutex);
      errors.insert(errors.end(), unreadable.begin(), unreadable.end());
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, std::vector<std::string>());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(SessionFolderTest, LocksEndWithTheirProcess) {
  WriteSession(Path("a"), 10);
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const SessionLock lock(Path("a"));
    static_cast<void>(!write(ready[1], "x", 1));
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(folder_.Info("a").owner, child);
  const std::string error = ErrorOf(ErrorCode::kUsage, [&] { folder_.Truncate("a", 1); });
  EXPECT_NE(error.find("process " + std::to_string(child)), std::string::npos) << error;
  EXPECT_FALSE(SessionLock::Try(Path("a")).held());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(folder_.Info("a").owner, 0);
  folder_.Truncate("a", 1);
}

TEST_F(SessionFolderTest, TheLeastRecentlyUsedGoFirst) {
  for (int i = 0; i < 6; ++i) {
    WriteSession(Path(std::to_string(i)), 1000);
    const auto when = fs::file_time_type::clock::now() - std::chrono::hours(10 - i);
    fs::last_write_time(Path(std::to_string(i)) / kManifestName, when);
  }
  const SessionLock used(Path("1"));
  SessionFolder limited(folder_.path(), folder_.Bytes());
  EXPECT_TRUE(limited.MakeRoom(0, "0").empty());
  EXPECT_EQ(limited.MakeRoom(1, "0"), std::vector<std::string>{"2"});
  // Five of some 75 kB are left of a budget of six.
  EXPECT_EQ(limited.MakeRoom(100000, "0"), std::vector<std::string>{"3"});
  EXPECT_EQ(limited.MakeRoom(250000, "0"), (std::vector<std::string>{"4", "5"}));
  // What is in use, and what is to be kept, is never given up.
  const std::string error =
      ErrorOf(ErrorCode::kUsage, [&] { limited.MakeRoom(limited.budget_bytes(), "0"); });
  EXPECT_NE(error.find("--session-budget"), std::string::npos) << error;
  EXPECT_TRUE(folder_.Has("0") && folder_.Has("1"));
}

TEST_F(SessionFolderTest, ReadOnlyAndMissingFolders) {
  const std::string error =
      ErrorOf(ErrorCode::kIo, [] { SessionFolder("/proc/no/such").Import("/dev/null", "a"); });
  EXPECT_NE(error.find("/dev/null"), std::string::npos) << error;
  std::ofstream(dir_.path() / "file") << "x";
  SessionFolder in_file(dir_.path() / "file" / "sessions");
  EXPECT_FALSE(in_file.Has("a"));
}

// A manifest whose values are changed and whose checksum is right.
class ForgedManifest : public SessionFolderTest {
 protected:
  template <typename Fn>
  std::string ErrorOfChange(const Fn& change) {
    Manifest m = WriteSession(Path("a"), 200);
    change(m);
    const std::string text = ManifestText(m);
    fs::remove_all(Path("a"));
    return ErrorOf(ErrorCode::kCorrupt, [&] { ParseManifest(text, "manifest.json"); });
  }
};

TEST_F(ForgedManifest, ValuesAreChecked) {
  ErrorOfChange([](Manifest& m) { m.n_tokens = -1; });
  ErrorOfChange([](Manifest& m) { m.n_tokens = m.saved_tokens + 1; });
  ErrorOfChange([](Manifest& m) { m.n_tokens = m.saved_tokens = 257; });
  ErrorOfChange([](Manifest& m) {
    m.heads.n_heads = 3;
    m.heads.n_kv_heads = 2;
  });
  ErrorOfChange([](Manifest& m) { m.heads.n_heads = 17; });
  ErrorOfChange([](Manifest& m) { m.heads.head_dim = 24; });
  ErrorOfChange([](Manifest& m) { m.heads.head_dim = 512; });
  ErrorOfChange([](Manifest& m) { m.n_layers = 0; });
  ErrorOfChange([](Manifest& m) { m.n_layers = 2; });  // rows of another size
  ErrorOfChange([](Manifest& m) { m.next_number = 1; });
  ErrorOfChange([](Manifest& m) { m.files[1].number = m.files[0].number; });
  ErrorOfChange([](Manifest& m) { m.files.pop_back(); });
  ErrorOfChange([](Manifest& m) { m.files.erase(m.files.begin()); });
  ErrorOfChange([](Manifest& m) { m.files[0].first = 64; });
  ErrorOfChange([](Manifest& m) { m.files[0].count = std::int64_t{1} << 62; });
  ErrorOfChange([](Manifest& m) { m.files[0].count = 0; });
  ErrorOfChange([](Manifest& m) { m.files[0].digest.bytes = 0; });
  ErrorOfChange([](Manifest& m) { m.files.push_back(m.files[1]); });
}

TEST_F(ForgedManifest, TextsThatAreNone) {
  for (const std::string& text :
       std::vector<std::string>{"", "{", "[]", "null", "{}", "{\"format\": \"fathom session\"}",
                                "{\"format\": 1}", "{\"format\": \"x\", \"version\": 1}"}) {
    ErrorOf(ErrorCode::kCorrupt, [&] { ParseManifest(text, "manifest.json"); });
  }
  // Every value replaced by one of another kind.
  const auto whole = nlohmann::json::parse(ManifestText(WriteSession(Path("a"), 100)));
  for (const auto& [key, value] : whole.items()) {
    for (const auto& other : {nlohmann::json(nullptr), nlohmann::json("x"), nlohmann::json(-5),
                              nlohmann::json(1e300), nlohmann::json::array({1})}) {
      nlohmann::json changed = whole;
      changed[key] = other;
      EXPECT_THROW(ParseManifest(changed.dump(), "manifest.json"), Error) << key;
    }
    nlohmann::json changed = whole;
    changed.erase(key);
    EXPECT_THROW(ParseManifest(changed.dump(), "manifest.json"), Error) << key;
  }
}

}  // namespace
}  // namespace fathom
