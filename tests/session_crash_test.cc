// SPDX-License-Identifier: MIT
// Sessions on disk when the process dies or a file operation fails, at every place where that can
// happen: each is as before or after the operation, intact, and goes on as if nothing had been.
//
// FATHOM_CRASH_POINTS (default 24) is how many places of death are tried over all operations.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <sstream>

#include "support/faulty_files.h"
#include "support/program.h"
#include "support/session_script.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

class SessionCrash : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    model = test::ScriptModel();
    text = test::ScriptText(*model);
    for (const std::int64_t end :
         {test::kScriptTokens, test::kScriptTokens + test::kAppendedTokens}) {
      Session session(model, test::ScriptOptions());
      if (end > test::kScriptTokens) {
        test::ReadTo(session, text, test::kScriptTokens, [](Session&) {});
        session.BuildIndex();
      }
      expected[end] = test::ContinueFrom(session, text, end);
    }
  }
  static void TearDownTestSuite() { model.reset(); }

  // A folder with the session "script" of kScriptTokens, made once.
  void Prepare(const fs::path& folder) const {
    fs::remove_all(folder);
    if (!fs::exists(ready_)) {
      SessionFolder sessions(ready_);
      StoredSession stored(sessions, "script", model);
      const auto session = stored.Resume(test::ScriptOptions());
      test::ReadTo(*session, text, test::kScriptTokens, [](Session&) {});
      session->BuildIndex();
      stored.Save(*session);
    }
    fs::copy(ready_, folder, fs::copy_options::recursive);
  }

  // Intact, and its continuation is that of a session that was never interrupted.
  static void Check(const fs::path& folder, const std::string& name, std::int64_t end) {
    SessionFolder sessions(folder);
    ASSERT_NO_THROW(sessions.Verify(name));
    StoredSession stored(sessions, name, model);
    const auto session = stored.Resume(test::ScriptOptions());
    ASSERT_TRUE(stored.WaitVerified());
    ASSERT_TRUE(std::equal(stored.tokens().begin(), stored.tokens().end(), text.begin()));
    EXPECT_EQ(test::ContinueFrom(*session, text, end), expected.at(end));
    stored.Save(*session);  // leftovers are in nobody's way
  }

  // The child's output, and whether it was killed.
  std::pair<std::string, bool> RunChild(const fs::path& folder, const std::string& operation,
                                        std::int64_t point) const {
    const std::string command = test::Quoted(FATHOM_PROGRAM) + " " + test::Quoted(folder.string()) +
                                " " + operation + " " + std::to_string(point) + " >" +
                                (dir_.path() / "out").string();
    const int status = std::system(("exec " + command).c_str());
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    EXPECT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
    return {test::ReadAll(dir_.path() / "out"), killed};
  }

  static std::int64_t LastSaved(const std::string& output) {
    std::istringstream lines(output);
    std::int64_t saved = -1;
    for (std::string word; lines >> word;) {
      if (word == "saved") lines >> saved;
    }
    return saved;
  }

  static std::int64_t TokensOf(const fs::path& folder, const std::string& name) {
    SessionFolder sessions(folder);
    return sessions.Has(name) ? sessions.Info(name).n_tokens : -1;
  }

  void CheckAfterDeath(const fs::path& folder, const std::string& operation,
                       const std::string& output) const;

  static std::shared_ptr<const Model> model;
  static std::vector<Token> text;
  static std::map<std::int64_t, std::vector<Token>> expected;  // by length
  const test::TempDir dir_;
  const fs::path ready_ = dir_.path() / "ready";
};
std::shared_ptr<const Model> SessionCrash::model;
std::vector<Token> SessionCrash::text;
std::map<std::int64_t, std::vector<Token>> SessionCrash::expected;

void SessionCrash::CheckAfterDeath(const fs::path& folder, const std::string& operation,
                                   const std::string& output) const {
  const std::int64_t n = TokensOf(folder, "script");
  if (operation == "prefill" || operation == "append") {
    const std::int64_t end =
        operation == "append" ? test::kScriptTokens + test::kAppendedTokens : test::kScriptTokens;
    const std::int64_t before = operation == "append" ? test::kScriptTokens : -1;
    const std::int64_t saved = std::max(LastSaved(output), before);
    // What Save has returned for is there; the next one may be.
    EXPECT_GE(n, saved);
    EXPECT_LE(n, std::min(std::max<std::int64_t>(saved, 0) + test::kScriptChunk, end));
    if (n >= 0) Check(folder, "script", end);
    return;
  }
  if (operation == "fork") {
    EXPECT_EQ(n, test::kScriptTokens);
    Check(folder, "script", test::kScriptTokens);
    if (TokensOf(folder, "copy") >= 0) Check(folder, "copy", test::kScriptTokens);
    return;
  }
  if (operation == "truncate") {
    EXPECT_TRUE(n == test::kScriptTokens || n == 100) << n;
  } else {
    EXPECT_TRUE(n == test::kScriptTokens || n == -1) << n;
  }
  if (n == test::kScriptTokens) {
    Check(folder, "script", n);
  } else if (n == 100) {
    SessionFolder sessions(folder);
    sessions.Verify("script");
    StoredSession stored(sessions, "script", model);
    EXPECT_EQ(stored.Resume(test::ScriptOptions())->n_tokens(), 100);
  }
}

TEST_F(SessionCrash, KillAtRandomPoints) {
  const char* wanted = std::getenv("FATHOM_CRASH_POINTS");
  const int n_points = wanted == nullptr ? 24 : std::atoi(wanted);
  const std::vector<std::string> operations = {"prefill", "append", "fork", "truncate", "remove"};
  const fs::path folder = dir_.path() / "sessions";
  std::vector<std::pair<std::string, std::int64_t>> points;
  for (const std::string& operation : operations) {
    operation == "prefill" ? static_cast<void>(fs::remove_all(folder)) : Prepare(folder);
    const std::string output = RunChild(folder, operation, -1).first;
    const auto done = output.find("done ");
    ASSERT_NE(done, std::string::npos) << operation << ": " << output;
    const std::int64_t count = std::atoll(output.c_str() + done + 5);
    for (std::int64_t i = 0; i < count; ++i) points.emplace_back(operation, i);
  }
  std::shuffle(points.begin(), points.end(), std::mt19937_64(20261130));
  // More deaths than places: from the front again, which repeats places but not their state.
  for (int i = 0; i < n_points; ++i) {
    const auto& [operation, point] = points[static_cast<std::size_t>(i) % points.size()];
    SCOPED_TRACE(operation + ", killed at " + std::to_string(point));
    operation == "prefill" ? static_cast<void>(fs::remove_all(folder)) : Prepare(folder);
    const auto [output, killed] = RunChild(folder, operation, point);
    ASSERT_TRUE(killed);
    CheckAfterDeath(folder, operation, output);
    if (HasFatalFailure()) return;
  }
  std::cout << "[ measured ] " << n_points << " deaths, " << points.size() << " places\n";
}

struct FailureCase {
  test::Fault fault;
  int error;
  const char* says;
};

// Every operation of a save fails once: a clear error, and the session stays as it was.
TEST_F(SessionCrash, SaveThatFailsLeavesTheOldState) {
  const std::vector<FailureCase> cases = {{test::Fault::kError, ENOSPC, "No space left on device"},
                                          {test::Fault::kError, EIO, "Input/output error"},
                                          {test::Fault::kHalfEnd, ENOSPC, "No space left"},
                                          {test::Fault::kHalf, 0, ""}};
  const fs::path folder = dir_.path() / "sessions";
  for (const FailureCase& c : cases) {
    for (std::int64_t at = 0;; ++at) {
      SCOPED_TRACE(std::string(c.says) + " at " + std::to_string(at));
      Prepare(folder);
      SessionFolder sessions(folder);
      bool failed = false;
      bool struck = false;
      std::int64_t unlinked = 0;
      {
        StoredSession stored(sessions, "script", model);
        const auto session = stored.Resume(test::ScriptOptions());
        test::ReadTo(*session, text, test::kScriptTokens + test::kAppendedTokens, [](Session&) {});
        session->BuildIndex();
        test::FaultyFiles files(c.fault, at, c.error);
        {
          const test::WithFiles use(&files);
          try {
            stored.Save(*session);
          } catch (const Error& error) {
            failed = true;
            EXPECT_EQ(error.code(), ErrorCode::kIo);
            EXPECT_NE(std::string(error.what()).find(c.says), std::string::npos) << error.what();
          }
        }
        struck = files.struck();
        const std::int64_t n = TokensOf(folder, "script");
        EXPECT_TRUE(n == test::kScriptTokens || n == session->n_tokens()) << n;
        if (!failed) {
          EXPECT_EQ(n, session->n_tokens());
        }
        if (c.fault == test::Fault::kHalf) {
          EXPECT_FALSE(failed);
        }
        ASSERT_NO_THROW(sessions.Verify("script"));
        // Once the disk works again, so does saving.
        if (at % 5 == 0) {
          stored.Save(*session);
          EXPECT_EQ(TokensOf(folder, "script"), session->n_tokens());
        }
      }
      if (at % 5 == 1) Check(folder, "script", test::kScriptTokens + test::kAppendedTokens);
      if (!struck) break;
      ASSERT_LT(at + unlinked, 100);
    }
  }
}

TEST_F(SessionCrash, ForkTruncateAndRemoveThatFailLeaveTheOldState) {
  const fs::path folder = dir_.path() / "sessions";
  const std::map<std::string, std::function<void(SessionFolder&)>> operations = {
      {"fork", [](SessionFolder& s) { s.Fork("script", "copy"); }},
      {"truncate", [](SessionFolder& s) { s.Truncate("script", 100); }},
      {"remove", [](SessionFolder& s) { s.Remove("script"); }}};
  for (const auto& [name, run] : operations) {
    for (std::int64_t at = 0;; ++at) {
      SCOPED_TRACE(name + " at " + std::to_string(at));
      Prepare(folder);
      SessionFolder sessions(folder);
      test::FaultyFiles files(test::Fault::kError, at, EIO);
      {
        const test::WithFiles use(&files);
        try {
          run(sessions);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kIo);
        }
      }
      CheckAfterDeath(folder, name, "");
      if (!files.struck()) break;
      ASSERT_LT(at, 100);
    }
  }
}

}  // namespace
}  // namespace fathom
