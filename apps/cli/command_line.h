// SPDX-License-Identifier: MIT
// Commands and their options, over CLI11. That library takes seconds to compile wherever it is
// included, so command_line.cc alone includes it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): as the library says it
class App;
class Option;
}  // namespace CLI

namespace fathom::cli {

// An option that was defined. Each function says one thing more of it, and gives it back.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option TypeName(const std::string& name) const;  // in help texts: "FILE", "N"
  Option Required() const;
  Option ShowDefault() const;                // what the variable holds now, in help texts
  Option SeparatedBy(char delimiter) const;  // several values in one argument
  Option OneValueEach() const;               // a second value needs the option's name again
  Option Excludes(const Option& other) const;
  // Whole numbers, or any, from low to high.
  Option InRange(int low, int high) const;
  Option InRange(double low, double high) const;
  Option OneOf(const std::vector<std::string>& values) const;

 private:
  CLI::Option* option_;
};

// A command of the program, or the program itself. A copy means the same command.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  Command AddCommand(const std::string& name, const std::string& help) const;
  // One of its commands must be given.
  void RequireCommand() const;
  // names: "-f,--file", or a word without dashes for an argument that is told by its place. Value
  // is a string, a number, or a vector of them: those at the end of command_line.cc.
  template <typename Value>
  Option AddOption(const std::string& names, Value& variable, const std::string& help) const;
  void AddFlag(const std::string& names, bool& variable, const std::string& help) const;
  // Was the option of that name given?
  bool Given(const std::string& name) const;
  // What runs when the command was given and all of its options are read.
  void OnRun(std::function<void()> run) const;

 private:
  CLI::App* app_;
};

class CommandLine {
 public:
  CommandLine(const std::string& program, const std::string& purpose);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command root() const;
  void SetVersion(const std::string& version);  // what --version prints
  // Runs the command that the arguments name, or prints the help or version that they ask for.
  // Throws Error(kUsage) that names the command whose help says more, and what the command throws.
  void Run(int argc, const char* const* argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace fathom::cli
