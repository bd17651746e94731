// SPDX-License-Identifier: MIT
// Runs the program as a user does: arguments for the shell in, exit code and both streams out. The
// test's target defines FATHOM_PROGRAM.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "support/temp_dir.h"

namespace fathom::test {

// For the shell: paths may have spaces.
inline std::string Quoted(const std::string& text) { return "'" + text + "'"; }

inline std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct ProgramResult {
  int code = -1;
  std::string out;
  std::string err;
};

class ProgramTest : public testing::Test {
 protected:
  // command: words before all arguments, such as "eval answers ".
  explicit ProgramTest(std::string command = "") : command_(std::move(command)) {}

  std::string Write(const std::string& name, const std::string& content) const {
    dir_.Write(name, content);
    return (folder_ / name).string();
  }

  ProgramResult Run(const std::string& arguments) const {
    const std::string command = Quoted(FATHOM_PROGRAM) + " " + command_ + arguments + " >" +
                                (folder_ / "out").string() + " 2>" + (folder_ / "err").string() +
                                " </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadAll(folder_ / "out"),
            ReadAll(folder_ / "err")};
  }

  // One clear line that holds all parts, nothing on standard output, the exit code.
  void ExpectError(const std::string& arguments, int code,
                   const std::vector<std::string>& parts) const {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.code, code) << arguments << "\n" << result.err;
    EXPECT_EQ(result.out, "") << arguments;
    for (const auto& part : parts)
      EXPECT_NE(result.err.find(part), std::string::npos) << arguments << "\n" << result.err;
    const auto lines = std::count(result.err.begin(), result.err.end(), '\n');
    EXPECT_EQ(lines, 1) << arguments << "\n" << result.err;
  }

 private:
  const TempDir dir_;
  const std::string command_;

 protected:
  const std::filesystem::path folder_ = dir_.path();
};

}  // namespace fathom::test
