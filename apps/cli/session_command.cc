// SPDX-License-Identifier: MIT
// `fathom session`: what is kept on disk, and what can be done to it without its model.
#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>

#include "common.h"
#include "progress.h"
#include "run_session.h"
#include "table.h"

namespace fathom::cli {
namespace {

struct SessionArguments {
  std::string folder;
  std::string name, other;
  std::int64_t n_tokens = 0;
  bool json = false;
};

std::string TimeText(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm utc = {};
  gmtime_r(&time, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M", &utc);
  return text.data();
}

nlohmann::json InfoJson(const StoredSessionInfo& info) {
  return {{"name", info.name},
          {"model", info.model},
          {"method", info.method},
          {"n_tokens", info.n_tokens},
          {"has_index", info.has_index},
          {"bytes", info.bytes},
          {"shared_bytes", info.shared_bytes},
          {"created", info.created},
          {"used", info.used},
          {"owner", info.owner},
          {"n_layers", info.n_layers},
          {"n_heads", info.heads.n_heads},
          {"n_kv_heads", info.heads.n_kv_heads},
          {"head_dim", info.heads.head_dim}};
}

void List(const SessionFolder& folder, const SessionArguments& arguments) {
  std::vector<std::string> unreadable;
  const auto sessions = folder.List(&unreadable);
  if (arguments.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const StoredSessionInfo& info : sessions) list.push_back(InfoJson(info));
    WriteOut(JsonText({{"folder", folder.path().string()},
                       {"bytes", folder.Bytes()},
                       {"sessions", list},
                       {"unreadable", unreadable}}));
  } else {
    Table table({"session", "tokens", "size", "shared", "last used, UTC", "in use by", "model"});
    for (const StoredSessionInfo& info : sessions) {
      table.Add({info.name, Grouped(info.n_tokens), ByteText(static_cast<double>(info.bytes)),
                 info.shared_bytes > 0 ? ByteText(static_cast<double>(info.shared_bytes)) : "-",
                 TimeText(info.used), info.owner > 0 ? std::to_string(info.owner) : "-",
                 info.model});
    }
    WriteOut(table.ToString());
    WriteOut(folder.path().string() + ": " + ByteText(static_cast<double>(folder.Bytes())) + "\n");
  }
  for (const std::string& name : unreadable) {
    std::fprintf(stderr, "fathom: session '%s' cannot be read; see fathom session info %s\n",
                 name.c_str(), name.c_str());
  }
}

void ShowInfo(const SessionFolder& folder, const SessionArguments& arguments) {
  const StoredSessionInfo info = folder.Info(arguments.name);
  if (arguments.json) return WriteOut(JsonText(InfoJson(info)));
  const auto line = [](const char* what, const std::string& value) {
    WriteOut(std::string(what) + value + "\n");
  };
  line("session   ", info.name);
  line("folder    ", (folder.path() / info.name).string());
  line("model     ", info.model);
  line("method    ", info.method + (info.has_index ? "" : " (index is made on resuming)"));
  line("tokens    ", Grouped(info.n_tokens));
  line("size      ",
       ByteText(static_cast<double>(info.bytes)) +
           (info.shared_bytes > 0
                ? ", of which shared: " + ByteText(static_cast<double>(info.shared_bytes))
                : ""));
  line("created   ", TimeText(info.created) + " UTC");
  line("last used ", TimeText(info.used) + " UTC");
  line("in use by ", info.owner > 0 ? "process " + std::to_string(info.owner) : "nobody");
}

void Verify(const SessionFolder& folder, const SessionArguments& arguments) {
  {
    Progress progress("verify", "bytes");
    folder.Verify(arguments.name, [&](std::int64_t done, std::int64_t total) {
      progress.Update(done, total);
      return !Interrupted();
    });
  }
  WriteOut("session '" + arguments.name + "' is intact\n");
}

using Action = std::function<void(SessionFolder&, const SessionArguments&)>;

// A subcommand with its arguments; `act` runs in the folder.
Command Add(Command session, const char* name, const char* help,
            const std::shared_ptr<SessionArguments>& arguments, int* exit_code, Action act) {
  Command command = session.AddCommand(name, help);
  AddSessionFolderOption(command, &arguments->folder);
  command.OnRun([arguments, exit_code, act = std::move(act)] {
    SessionFolder folder(SessionFolderPath(arguments->folder));
    act(folder, *arguments);
    *exit_code = kExitOk;
  });
  return command;
}

void AddName(Command command, std::string* name, const char* what = "NAME") {
  command.AddOption(what, *name, "name of a session").Required();
}

void AddReading(Command session, const std::shared_ptr<SessionArguments>& a, int* exit_code) {
  Command list = Add(session, "list", "What sessions there are", a, exit_code, List);
  list.AddFlag("--json", a->json, "print one JSON document instead of a table");
  Command info = Add(session, "info", "What one session is", a, exit_code, ShowInfo);
  AddName(info, &a->name);
  info.AddFlag("--json", a->json, "print one JSON document instead of text");
  AddName(
      Add(session, "verify", "Read all of a session and compare checksums", a, exit_code, Verify),
      &a->name);
  Command out = Add(session, "export", "Write a session to one file, a tar archive", a, exit_code,
                    [](SessionFolder& folder, const SessionArguments& arguments) {
                      folder.Export(arguments.name, arguments.other);
                    });
  AddName(out, &a->name);
  out.AddOption("FILE", a->other, "file to write").Required();
}

void AddWriting(Command session, const std::shared_ptr<SessionArguments>& a, int* exit_code) {
  Command fork = Add(session, "fork", "Copy a session; both share what they have in common", a,
                     exit_code, [](SessionFolder& folder, const SessionArguments& arguments) {
                       folder.Fork(arguments.name, arguments.other);
                     });
  AddName(fork, &a->name);
  AddName(fork, &a->other, "NEW");
  Command cut = Add(session, "truncate", "Forget the end of a session", a, exit_code,
                    [](SessionFolder& folder, const SessionArguments& arguments) {
                      folder.Truncate(arguments.name, arguments.n_tokens);
                    });
  AddName(cut, &a->name);
  cut.AddOption("TOKENS", a->n_tokens, "how many tokens stay").Required();
  AddName(Add(session, "rm", "Remove a session", a, exit_code,
              [](SessionFolder& folder, const SessionArguments& arguments) {
                folder.Remove(arguments.name);
              }),
          &a->name);
  Command in = Add(session, "import", "Read a session from a file that export wrote", a, exit_code,
                   [](SessionFolder& folder, const SessionArguments& arguments) {
                     folder.Import(arguments.other, arguments.name);
                   });
  in.AddOption("FILE", a->other, "file to read").Required();
  AddName(in, &a->name);
}

}  // namespace

void AddSessionCommand(Command app, int* exit_code) {
  Command session = app.AddCommand(
      "session", "Sessions on disk: list, info, fork, truncate, rm, verify, export, import");
  session.RequireCommand();
  const auto arguments = std::make_shared<SessionArguments>();
  AddReading(session, arguments, exit_code);
  AddWriting(session, arguments, exit_code);
}

}  // namespace fathom::cli
