// SPDX-License-Identifier: MIT
#include "command_line.h"

#include <CLI/CLI.hpp>
#include <cstdint>
#include <utility>

#include "common.h"

namespace fathom::cli {
namespace {

// A range check whose help text is "in low..high".
template <typename Number>
CLI::Range RangeCheck(Number low, Number high) {
  CLI::Range range(low, high);
  range.description("in " + Plain(low) + ".." + Plain(high));
  return range;
}

// The parser's own message for an unknown command does not name it. Returns the command's words,
// "fathom run".
std::string CheckCommand(const CLI::App& app, int argc, const char* const* argv) {
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (commands.empty() || argc < 2 || argv[1][0] == '-') return app.get_name();
  std::string valid;
  for (const CLI::App* command : commands) {
    if (command->get_name() == argv[1]) {
      return app.get_name() + " " + CheckCommand(*command, argc - 1, argv + 1);
    }
    valid += (valid.empty() ? "" : ", ") + command->get_name();
  }
  throw Error(ErrorCode::kUsage, "unknown command '" + std::string(argv[1]) + "'; valid: " + valid);
}

}  // namespace

Option Option::TypeName(const std::string& name) const {
  option_->type_name(name);
  return *this;
}

Option Option::Required() const {
  option_->required();
  return *this;
}

Option Option::ShowDefault() const {
  option_->capture_default_str();
  return *this;
}

Option Option::SeparatedBy(char delimiter) const {
  option_->delimiter(delimiter);
  return *this;
}

Option Option::OneValueEach() const {
  option_->allow_extra_args(false);
  return *this;
}

Option Option::Excludes(const Option& other) const {
  option_->excludes(other.option_);
  return *this;
}

Option Option::InRange(int low, int high) const {
  option_->check(RangeCheck(low, high));
  return *this;
}

Option Option::InRange(double low, double high) const {
  option_->check(RangeCheck(low, high));
  return *this;
}

Option Option::OneOf(const std::vector<std::string>& values) const {
  option_->check(CLI::IsMember(values));
  return *this;
}

Command Command::AddCommand(const std::string& name, const std::string& help) const {
  return Command(app_->add_subcommand(name, help));
}

void Command::RequireCommand() const { app_->require_subcommand(1); }

template <typename Value>
Option Command::AddOption(const std::string& names, Value& variable,
                          const std::string& help) const {
  return Option(app_->add_option(names, variable, help));
}

void Command::AddFlag(const std::string& names, bool& variable, const std::string& help) const {
  app_->add_flag(names, variable, help);
}

bool Command::Given(const std::string& name) const { return app_->count(name) > 0; }

void Command::OnRun(std::function<void()> run) const { app_->callback(std::move(run)); }

CommandLine::CommandLine(const std::string& program, const std::string& purpose)
    : app_(std::make_unique<CLI::App>(purpose, program)) {}
CommandLine::~CommandLine() = default;

Command CommandLine::root() const { return Command(app_.get()); }

void CommandLine::SetVersion(const std::string& version) {
  app_->set_version_flag("--version", version);
}

void CommandLine::Run(int argc, const char* const* argv) {
  const std::string command = CheckCommand(*app_, argc, argv);
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) {
      throw Error(ErrorCode::kUsage, std::string(error.what()) + "; see " + command + " --help");
    }
    app_->exit(error);  // help and version are "errors" with code 0
  }
}

template Option Command::AddOption(const std::string&, std::string&, const std::string&) const;
template Option Command::AddOption(const std::string&, std::int32_t&, const std::string&) const;
template Option Command::AddOption(const std::string&, std::uint32_t&, const std::string&) const;
template Option Command::AddOption(const std::string&, std::int64_t&, const std::string&) const;
template Option Command::AddOption(const std::string&, std::uint64_t&, const std::string&) const;
template Option Command::AddOption(const std::string&, float&, const std::string&) const;
template Option Command::AddOption(const std::string&, double&, const std::string&) const;
template Option Command::AddOption(const std::string&, std::vector<std::string>&,
                                   const std::string&) const;
template Option Command::AddOption(const std::string&, std::vector<std::int32_t>&,
                                   const std::string&) const;
template Option Command::AddOption(const std::string&, std::vector<double>&,
                                   const std::string&) const;

}  // namespace fathom::cli
