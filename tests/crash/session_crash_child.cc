// SPDX-License-Identifier: MIT
// session_crash_child FOLDER OPERATION POINT: does one thing to the sessions of FOLDER and dies at
// the POINT-th file operation (counted from 0; -1 never), as kill -9 would. Writes a line "saved N"
// to standard output whenever N tokens have been saved, "done COUNT" at the end.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "support/faulty_files.h"
#include "support/session_script.h"

namespace {

using namespace fathom;

void Say(const std::string& line) {
  const std::string text = line + "\n";
  if (write(STDOUT_FILENO, text.data(), text.size()) < 0) std::abort();
}

void ReadAndSave(SessionFolder& folder, std::int64_t end) {
  const auto model = test::ScriptModel();
  const auto text = test::ScriptText(*model);
  StoredSession stored(folder, "script", model);
  const auto session = stored.Resume(test::ScriptOptions());
  const auto save = [&](Session& s) {
    stored.Save(s);
    Say("saved " + std::to_string(s.n_tokens()));
  };
  test::ReadTo(*session, text, end, save);
  session->BuildIndex();
  save(*session);
}

void Run(SessionFolder& folder, const std::string& operation) {
  if (operation == "prefill") return ReadAndSave(folder, test::kScriptTokens);
  if (operation == "append")
    return ReadAndSave(folder, test::kScriptTokens + test::kAppendedTokens);
  if (operation == "fork") return folder.Fork("script", "copy");
  if (operation == "truncate") return folder.Truncate("script", 100);
  if (operation == "remove") return folder.Remove("script");
  std::cerr << "unknown operation " << operation << "\n";
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::int64_t point = std::atoll(argv[3]);
  test::FaultyFiles files(point < 0 ? test::Fault::kNone : test::Fault::kKill, point);
  const test::WithFiles use(&files);
  try {
    SessionFolder folder(argv[1]);
    Run(folder, argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  Say("done " + std::to_string(files.count()));
  return 0;
}
