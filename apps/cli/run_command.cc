// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstdio>
#include <memory>

#include "common.h"
#include "progress.h"
#include "prompts.h"
#include "run.h"

namespace fathom::cli {
namespace {

void CheckOptions(const RunOptions& options) {
  if (options.file.empty() && options.prompts.empty()) {
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

// Prefill with a bar; a message of what happened to an interrupted one.
void PrefillWithProgress(Session& session, std::span<const Token> tokens,
                         const std::string& label) {
  Progress progress(label, "tokens");
  session.Prefill(tokens, [&](std::int64_t done, std::int64_t total) {
    progress.Update(done, total);
    return !Interrupted();
  });
}

Answer AskOne(Session& session, const RunOptions& options, const std::string& question,
              std::span<const Token> rest, bool stream) {
  session.ResetTimes();
  session.method().ResetCounters();
  session.Prefill(rest, [](std::int64_t, std::int64_t) { return !Interrupted(); });
  Answer answer;
  answer.question = question;
  answer.n_prompt_tokens = session.n_tokens();
  answer.generation =
      Generate(session, {options.predict, options.sampling}, [&](Token, std::string_view text) {
        if (stream) WriteOut(text);
        return !Interrupted();
      });
  if (stream) WriteOut("\n");
  answer.times = session.times();
  answer.counters = session.method().counters();
  return answer;
}

MethodRun AskAll(Session& session, const RunOptions& options,
                 const std::vector<std::vector<Token>>& prompts, std::int64_t shared,
                 bool announce) {
  MethodRun run;
  run.label = session.options().method;
  run.spec = session.method().spec();
  session.ResetTimes();
  session.BuildIndex();
  run.index_s = session.times().index_s;
  if (announce && !options.json) WriteOut("== " + run.label + "\n");
  for (std::size_t i = 0; i < prompts.size() && !Interrupted(); ++i) {
    if (prompts.size() > 1 && !options.json) {
      WriteOut("> " + options.prompts[i] + "\n");
    }
    const std::string question = options.prompts.empty() ? "" : options.prompts[i];
    run.answers.push_back(AskOne(session, options, question,
                                 std::span(prompts[i]).subspan(static_cast<std::size_t>(shared)),
                                 !options.json));
    run.index_bytes = session.method().MemoryBytes();
    if (i + 1 < prompts.size()) session.Truncate(shared);
  }
  return run;
}

RunReport Execute(const RunOptions& options) {
  CheckOptions(options);
  const std::string document = ReadDocument(options);
  const auto statistics = LoadStatistics(options.statistics_file);
  const auto model = Model::Open(options.model);
  std::vector<std::string> questions = options.prompts;
  if (questions.empty()) questions.emplace_back();
  const auto prompts = BuildPrompts(*model, document, questions, UseChat(*model, options.no_chat));

  SessionOptions session_options;
  session_options.ctx_size = ContextSize(*model, options, prompts);
  session_options.backend = options.backend;
  session_options.method = options.method;
  session_options.n_threads = options.threads;
  session_options.calibration = statistics;
  Session session(model, session_options);

  RunReport report;
  report.model = model->info();
  report.backend = std::string(session.backend().name());
  report.threads = session.backend().n_threads();
  report.ctx_size = session_options.ctx_size;
  report.statistics_file = options.statistics_file;
  report.document_bytes = static_cast<std::int64_t>(document.size());
  report.shared_tokens = SharedTokens(prompts);
  try {
    PrefillWithProgress(
        session, std::span(prompts.front()).first(static_cast<std::size_t>(report.shared_tokens)),
        "prefill");
    report.prefill = session.times();
    report.runs.push_back(
        AskAll(session, options, prompts, report.shared_tokens, !options.compare.empty()));
    if (!options.compare.empty() && !Interrupted()) {
      session.Truncate(report.shared_tokens);
      session.SetMethod(options.compare);
      report.runs.push_back(AskAll(session, options, prompts, report.shared_tokens, true));
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    std::fprintf(stderr, "fathom: %s\n", error.what());
    if (report.runs.empty()) report.prefill = session.times();
  }
  report.rows_bytes = session.rows().MemoryBytes();
  report.interrupted = Interrupted();
  return report;
}

int Run(const RunOptions& options) {
  const RunReport report = Execute(options);
  if (options.json) {
    // Bytes that are not UTF-8 can stand in an answer; JSON cannot hold them.
    WriteOut(ReportJson(report).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
             "\n");
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

}  // namespace

void AddRunCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* run = app.add_subcommand("run", "Answer questions about a document, or continue it");
  run->add_option("-m,--model", options->model, "GGUF model, required")->type_name("FILE");
  run->add_option("-f,--file", options->file, "document; - reads standard input")
      ->type_name("FILE");
  run->add_option("-p,--prompt", options->prompts,
                  "question or instruction; repeat for several about one document")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  run->add_option("-c,--ctx-size", options->ctx_size,
                  "context in tokens (32768 or 32k); default: what the prompts need")
      ->type_name("N");
  run->add_option("-n,--predict", options->predict, "longest answer in tokens")
      ->type_name("N")
      ->capture_default_str()
      ->check(InRange(1, 1 << 20));
  AddMachineOptions(*run, &options->threads, &options->backend);
  run->add_option("--method", options->method, "method spec (see fathom info)")
      ->type_name("SPEC")
      ->capture_default_str();
  run->add_option("--compare", options->compare, "second method spec, from the same prefill")
      ->type_name("SPEC");
  run->add_option("--stats-file", options->statistics_file, kStatsFileHelp)->type_name("FILE");
  run->add_option("--temp", options->sampling.temperature, "temperature; 0 is greedy")
      ->type_name("T")
      ->capture_default_str()
      ->check(InRange(0.0, 100.0));
  run->add_option("--top-k", options->sampling.top_k, "sample among the best K; 0 is off")
      ->type_name("K")
      ->capture_default_str()
      ->check(InRange(0, 1 << 20));
  run->add_option("--top-p", options->sampling.top_p, "sample within this probability; 1 is off")
      ->type_name("P")
      ->capture_default_str()
      ->check(InRange(0.0, 1.0));
  run->add_option("--seed", options->sampling.seed, "random seed")
      ->type_name("N")
      ->capture_default_str();
  run->add_flag("--no-chat", options->no_chat, "continue the text; no chat template");
  run->add_flag("--stats", options->stats, "show a table of speeds and bytes on standard error");
  run->add_flag("--json", options->json, "print one JSON document instead of text");
  run->callback([options, exit_code] { *exit_code = Run(*options); });
}

}  // namespace fathom::cli
