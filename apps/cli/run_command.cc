// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "common.h"
#include "progress.h"
#include "prompts.h"
#include "run.h"
#include "run_session.h"

namespace fathom::cli {
namespace {

void CheckOptions(const RunOptions& options) {
  if (options.file.empty() && options.prompts.empty() && options.session.empty()) {
    throw Error(ErrorCode::kUsage,
                "nothing to read: give a document with -f FILE, a question with -p TEXT, or both");
  }
  if (options.model.empty()) {
    throw Error(ErrorCode::kUsage, "a model is needed: -m MODEL.gguf");
  }
  for (const std::string& prompt : options.prompts) {
    if (TrimEnd(prompt).empty()) {
      throw Error(ErrorCode::kUsage, "a question (-p) is empty; give some text or leave it out");
    }
  }
  if (options.no_chat && options.file.empty() && options.prompts.size() > 1) {
    throw Error(ErrorCode::kUsage,
                "several -p with --no-chat need a document (-f) that they share");
  }
  if (!options.session.empty() && !options.compare.empty()) {
    throw Error(ErrorCode::kUsage,
                "--compare with --session: a session keeps one method's index; fork it "
                "(fathom session fork) and run each method on its own");
  }
  if (options.session.empty() && options.session_replace) {
    throw Error(ErrorCode::kUsage, "--session-replace needs --session NAME");
  }
  ParseBytes(options.session_budget);
  ValidateMethodSpec(MethodSpec::Parse(options.method));
  if (!options.compare.empty()) ValidateMethodSpec(MethodSpec::Parse(options.compare));
}

std::string ReadDocument(const RunOptions& options) {
  if (options.file.empty()) return "";
  std::string text = ReadText(options.file);
  if (TrimEnd(text).empty()) {
    throw Error(ErrorCode::kUsage,
                "document '" + options.file + "' is empty; give a file with text, or leave out -f");
  }
  return text;
}

std::int64_t ContextSize(const Model& model, const RunOptions& options,
                         const std::vector<std::vector<Token>>& prompts) {
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  const auto prompt_tokens = static_cast<std::int64_t>(longest);
  const std::int64_t trained = model.info().n_ctx_train;
  const std::int64_t ctx = options.ctx_size.empty() ? std::min(prompt_tokens + options.predict,
                                                               std::max(trained, std::int64_t{1}))
                                                    : ParseTokens(options.ctx_size);
  if (prompt_tokens > ctx) {
    throw Error(ErrorCode::kUsage,
                "the prompt has " + Grouped(prompt_tokens) + " tokens, " +
                    Grouped(prompt_tokens - ctx) + " more than the context of " + Grouped(ctx) +
                    "; use -c " + std::to_string(prompt_tokens + options.predict) + " (" +
                    Grouped(options.predict) + " for the answer)" +
                    (prompt_tokens > trained
                         ? ", beyond the " + Grouped(trained) + " the model was made for"
                         : ""));
  }
  if (prompt_tokens + options.predict > ctx && !options.ctx_size.empty()) {
    std::fprintf(stderr, "fathom: the context of %s leaves %s tokens for the answer, not %s\n",
                 Grouped(ctx).c_str(), Grouped(ctx - prompt_tokens).c_str(),
                 Grouped(options.predict).c_str());
  }
  if (ctx > trained) {
    std::fprintf(stderr,
                 "fathom: a context of %s is beyond the %s tokens this model was made for; expect "
                 "mistakes\n",
                 Grouped(ctx).c_str(), Grouped(trained).c_str());
  }
  return ctx;
}

// Prefill with a bar, saved now and then where the session is kept.
void PrefillWithProgress(Session& session, std::span<const Token> tokens, KeptSession* kept) {
  Progress progress("prefill", "tokens");
  session.Prefill(tokens, [&](std::int64_t done, std::int64_t total) {
    progress.Update(done, total);
    if (kept != nullptr) kept->Checkpoint(session);
    return !Interrupted();
  });
}

Answer AskOne(Session& session, const RunOptions& options, const std::string& question,
              std::span<const Token> rest, KeptSession* kept) {
  session.ResetTimes();
  session.method().ResetCounters();
  session.Prefill(rest, [](std::int64_t, std::int64_t) { return !Interrupted(); });
  Answer answer;
  answer.question = question;
  answer.n_prompt_tokens = session.n_tokens();
  answer.generation =
      Generate(session, {options.predict, options.sampling}, [&](Token, std::string_view text) {
        if (kept != nullptr) kept->WaitVerified();
        if (!options.json) WriteOut(text);
        return !Interrupted();
      });
  if (!options.json) WriteOut("\n");
  answer.times = session.times();
  answer.counters = session.method().counters();
  return answer;
}

// Makes the index.
MethodRun BeginRun(Session& session) {
  MethodRun run;
  run.label = session.options().method;
  run.spec = session.method().spec();
  session.ResetTimes();
  session.BuildIndex();
  run.index_s = session.times().index_s;
  return run;
}

// The answers of one method to prompts, the first of which begins with the session's tokens.
MethodRun AskAll(Session& session, const RunOptions& options,
                 const std::vector<std::vector<Token>>& prompts, std::int64_t shared, bool announce,
                 KeptSession* kept) {
  MethodRun run = BeginRun(session);
  if (kept != nullptr) kept->SaveNew(session);
  if (announce && !options.json) WriteOut("== " + run.label + "\n");
  for (std::size_t i = 0; i < prompts.size() && !Interrupted(); ++i) {
    if (prompts.size() > 1 && !options.json) {
      WriteOut("> " + options.prompts[i] + "\n");
    }
    const std::string question = options.prompts.empty() ? "" : options.prompts[i];
    const std::span<const Token> prompt = prompts[i];
    run.answers.push_back(AskOne(session, options, question,
                                 prompt.subspan(static_cast<std::size_t>(session.n_tokens())),
                                 kept));
    run.index_bytes = session.method().MemoryBytes();
    run.decode_attention = session.decode_attention();
    if (i + 1 < prompts.size()) session.Truncate(shared);
  }
  if (kept != nullptr) kept->Save(session);
  return run;
}

// Goes on where a kept session ended: each question is the next turn; none continues the text.
MethodRun Converse(Session& session, const RunOptions& options, bool chat, KeptSession* kept) {
  MethodRun run = BeginRun(session);
  std::vector<std::string> questions = options.prompts;
  if (questions.empty()) questions.emplace_back();
  for (std::size_t i = 0; i < questions.size() && !Interrupted(); ++i) {
    if (questions.size() > 1 && !options.json) WriteOut("> " + questions[i] + "\n");
    std::vector<Token> rest;
    if (!questions[i].empty()) {
      rest = NextTurn(session.model(), questions[i], chat);
    } else if (session.logits().empty()) {
      rest.push_back(session.tokens().back());
      session.Truncate(session.n_tokens() - 1);
    }
    run.answers.push_back(AskOne(session, options, questions[i], rest, kept));
    run.index_bytes = session.method().MemoryBytes();
    run.decode_attention = session.decode_attention();
    kept->Save(session);
  }
  return run;
}

// What a run works with.
struct RunInputs {
  std::string document;
  std::shared_ptr<const Model> model;
  bool chat = false;
  std::unique_ptr<KeptSession> kept;        // null: nothing is kept
  bool converses = false;                   // goes on where the kept session ended
  std::vector<std::vector<Token>> prompts;  // of all questions; of a conversation, the first
  std::int64_t shared = 0;                  // tokens that they begin with
  std::int64_t reused = 0;                  // of those, kept ones
  std::int64_t more = 0;  // of a conversation, all that may follow the first answer
};

RunInputs Prepare(const RunOptions& options) {
  RunInputs in;
  in.document = ReadDocument(options);
  in.model = Model::Open(options.model);
  in.chat = UseChat(*in.model, options.no_chat);
  if (!options.session.empty()) in.kept = std::make_unique<KeptSession>(options, in.model);
  in.converses = in.kept != nullptr && in.document.empty() && !in.kept->tokens().empty();
  std::vector<std::string> questions = options.prompts;
  if (questions.empty()) questions.emplace_back();
  if (in.converses) {
    in.prompts.push_back(in.kept->tokens());
    if (!questions.front().empty()) {
      const std::vector<Token> next = NextTurn(*in.model, questions.front(), in.chat);
      in.prompts.front().insert(in.prompts.front().end(), next.begin(), next.end());
    }
    in.shared = in.reused = static_cast<std::int64_t>(in.kept->tokens().size());
    for (std::size_t i = 1; i < questions.size(); ++i) {
      in.more += options.predict +
                 static_cast<std::int64_t>(NextTurn(*in.model, questions[i], in.chat).size());
    }
    return in;
  }
  if (in.document.empty() && questions.front().empty()) {
    throw Error(ErrorCode::kUsage, "there is no session '" + options.session +
                                       "' to continue; give a document with -f FILE, a question "
                                       "with -p TEXT, or both");
  }
  in.prompts = BuildPrompts(*in.model, in.document, questions, in.chat);
  in.shared = SharedTokens(in.prompts);
  if (in.kept == nullptr) return in;
  // The index is of the document alone, so that it serves other questions too.
  in.shared = std::min(in.shared, DocumentTokens(*in.model, in.document, questions.front(), in.chat,
                                                 in.prompts.front()));
  in.reused = in.kept->Reuse(in.prompts.front(), in.shared);
  return in;
}

SessionOptions MakeSessionOptions(const RunOptions& options, const RunInputs& in) {
  SessionOptions session;
  session.ctx_size = ContextSize(*in.model, options, in.prompts);
  // All that is kept is there before some of it may go.
  if (in.kept != nullptr && options.ctx_size.empty()) {
    session.ctx_size =
        std::max(session.ctx_size + in.more, static_cast<std::int64_t>(in.kept->tokens().size()));
  }
  session.backend = options.backend;
  session.device = options.device;
  session.decode_attention = options.decode_attention;
  session.method = options.method;
  session.n_threads = options.threads;
  session.calibration = LoadStatistics(options.statistics_file);
  return session;
}

void AnswerAll(Session& session, const RunOptions& options, RunInputs& in, RunReport* report) {
  if (in.converses) {
    report->runs.push_back(Converse(session, options, in.chat, in.kept.get()));
    return;
  }
  const std::span<const Token> shared =
      std::span(in.prompts.front()).first(static_cast<std::size_t>(in.shared));
  if (session.n_tokens() < in.shared) {
    PrefillWithProgress(session, shared.subspan(static_cast<std::size_t>(session.n_tokens())),
                        in.kept.get());
  }
  report->prefill = session.times();
  const bool compares = !options.compare.empty();
  report->runs.push_back(AskAll(session, options, in.prompts, in.shared, compares, in.kept.get()));
  if (!compares || Interrupted()) return;
  session.Truncate(in.shared);
  session.SetMethod(options.compare);
  report->runs.push_back(AskAll(session, options, in.prompts, in.shared, true, nullptr));
}

RunReport Execute(const RunOptions& options) {
  CheckOptions(options);
  RunInputs in = Prepare(options);
  const SessionOptions session_options = MakeSessionOptions(options, in);
  const std::int64_t full =
      static_cast<std::int64_t>(in.prompts.front().size()) + options.predict + in.more;
  const auto session = in.kept == nullptr ? std::make_unique<Session>(in.model, session_options)
                                          : in.kept->Open(session_options, in.reused,
                                                          std::min(full, session_options.ctx_size));
  RunReport report;
  report.model = in.model->info();
  report.backend = std::string(session->backend().name());
  report.device = options.device;
  report.threads = session->backend().n_threads();
  report.ctx_size = session_options.ctx_size;
  report.statistics_file = options.statistics_file;
  report.document_bytes = static_cast<std::int64_t>(in.document.size());
  report.shared_tokens = in.shared;
  try {
    AnswerAll(*session, options, in, &report);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    std::fprintf(stderr, "fathom: %s\n", error.what());
    if (report.runs.empty()) report.prefill = session->times();
    if (in.kept != nullptr) in.kept->Save(*session);
  }
  if (in.kept != nullptr) report.session = in.kept->report();
  report.rows_bytes = session->rows().MemoryBytes();
  report.interrupted = Interrupted();
  return report;
}

int Run(const RunOptions& options) {
  const RunReport report = Execute(options);
  if (options.device == "cuda") std::fputs(DecodeAttentionText(report).c_str(), stderr);
  if (options.json) {
    WriteOut(JsonText(ReportJson(report)));
  } else {
    if (report.runs.size() > 1) WriteOut("\n" + ComparisonText(report));
    // Standard output holds the answers alone, so that they can be piped.
    if (options.stats && !report.runs.empty()) {
      std::fprintf(stderr, "\n%s", StatsTable(report).c_str());
    }
  }
  for (const MethodRun& run : report.runs) {
    for (const Answer& answer : run.answers) {
      if (answer.generation.stop != StopReason::kContext) continue;
      std::fprintf(
          stderr, "fathom: the context of %s tokens is full; the answer was cut, use a larger -c\n",
          Grouped(report.ctx_size).c_str());
    }
  }
  return report.interrupted ? kExitInterrupted : kExitOk;
}

void AddSessionOptions(Command run, RunOptions* options) {
  run.AddOption("--session", options->session,
                "keep everything on disk under this name, and go on from what is there")
      .TypeName("NAME");
  AddSessionFolderOption(run, &options->session_dir);
  run.AddOption("--session-budget", options->session_budget,
                "most bytes of all sessions, as 20G; those unused for longest go first")
      .TypeName("SIZE");
  run.AddOption("--session-checkpoint", options->session_checkpoint,
                "save a prefill every so many seconds")
      .TypeName("S")
      .ShowDefault()
      .InRange(0, 1 << 20);
  run.AddFlag("--session-replace", options->session_replace,
              "where the document differs from the session, the document wins");
}

}  // namespace

void AddRunCommand(Command app, int* exit_code) {
  auto options = std::make_shared<RunOptions>();
  Command run = app.AddCommand("run", "Answer questions about a document, or continue it");
  AddSessionOptions(run, options.get());
  run.AddOption("-m,--model", options->model, "GGUF model, required").TypeName("FILE");
  run.AddOption("-f,--file", options->file, "document; - reads standard input").TypeName("FILE");
  run.AddOption("-p,--prompt", options->prompts,
                "question or instruction; repeat for several about one document")
      .TypeName("TEXT")
      .OneValueEach();
  run.AddOption("-c,--ctx-size", options->ctx_size,
                "context in tokens (32768 or 32k); default: what the prompts need")
      .TypeName("N");
  run.AddOption("-n,--predict", options->predict, "longest answer in tokens")
      .TypeName("N")
      .ShowDefault()
      .InRange(1, 1 << 20);
  AddMachineOptions(run, &options->threads, &options->backend);
  AddDeviceOptions(run, &options->device, &options->decode_attention);
  run.AddOption("--method", options->method, "method spec (see fathom info)")
      .TypeName("SPEC")
      .ShowDefault();
  run.AddOption("--compare", options->compare, "second method spec, from the same prefill")
      .TypeName("SPEC");
  run.AddOption("--stats-file", options->statistics_file, kStatsFileHelp).TypeName("FILE");
  run.AddOption("--temp", options->sampling.temperature, "temperature; 0 is greedy")
      .TypeName("T")
      .ShowDefault()
      .InRange(0.0, 100.0);
  run.AddOption("--top-k", options->sampling.top_k, "sample among the best K; 0 is off")
      .TypeName("K")
      .ShowDefault()
      .InRange(0, 1 << 20);
  run.AddOption("--top-p", options->sampling.top_p, "sample within this probability; 1 is off")
      .TypeName("P")
      .ShowDefault()
      .InRange(0.0, 1.0);
  run.AddOption("--seed", options->sampling.seed, "random seed").TypeName("N").ShowDefault();
  run.AddFlag("--no-chat", options->no_chat, "continue the text; no chat template");
  run.AddFlag("--stats", options->stats, "show a table of speeds and bytes on standard error");
  run.AddFlag("--json", options->json, "print one JSON document instead of text");
  run.OnRun([options, run, exit_code] {
    options->method_given = run.Given("--method");
    *exit_code = Run(*options);
  });
}

}  // namespace fathom::cli
