// SPDX-License-Identifier: MIT
#include "eval_answers.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "eval_score.h"
#include "progress.h"
#include "prompts.h"
#include "question_file.h"
#include "specs.h"

namespace fathom::cli {
namespace {

// A document's tokens and what each question adds to them.
struct Prepared {
  std::vector<Token> shared;
  std::vector<std::vector<Token>> rest;  // [question]
};

std::vector<EvalDocument> ReadFiles(const EvalAnswersOptions& options) {
  std::vector<EvalDocument> documents;
  auto left = static_cast<std::size_t>(options.limit);
  for (const std::string& file : options.files) {
    for (EvalDocument& document : ReadQuestionFile(file)) {
      if (options.limit > 0) {
        if (left == 0) return documents;
        const std::size_t n = std::min(left, document.questions.size());
        document.questions.resize(n);
        left -= n;
      }
      documents.push_back(std::move(document));
    }
  }
  return documents;
}

Prepared Prepare(const Model& model, const EvalDocument& document, bool chat) {
  std::vector<std::string> texts;
  for (const EvalQuestion& question : document.questions) texts.push_back(question.text);
  // Two more texts that begin differently: what all prompts share is then the document alone, not
  // also words that its questions happen to begin with.
  texts.insert(texts.end(), {"What", "7"});
  auto prompts = BuildPrompts(model, document.text, texts, chat);
  const auto shared = static_cast<std::ptrdiff_t>(SharedTokens(prompts));
  prompts.resize(document.questions.size());
  Prepared prepared;
  prepared.shared.assign(prompts.front().begin(), prompts.front().begin() + shared);
  for (const auto& prompt : prompts)
    prepared.rest.emplace_back(prompt.begin() + shared, prompt.end());
  return prepared;
}

std::int64_t ContextSize(const Model& model, const std::vector<Prepared>& documents,
                         std::int64_t predict) {
  std::size_t longest = 0;
  for (const Prepared& document : documents) {
    for (const auto& rest : document.rest)
      longest = std::max(longest, document.shared.size() + rest.size());
  }
  const auto ctx = static_cast<std::int64_t>(longest) + predict;
  const std::int64_t trained = model.info().n_ctx_train;
  if (ctx > trained) {
    std::fprintf(stderr,
                 "fathom: a context of %s is beyond the %s tokens this model was made for; expect "
                 "mistakes\n",
                 Grouped(ctx).c_str(), Grouped(trained).c_str());
  }
  return ctx;
}

void StopIfInterrupted() {
  if (Interrupted()) throw Error(ErrorCode::kCancelled, "interrupted");
}

EvalAnswer Ask(Session& session, const EvalAnswersOptions& options, const EvalQuestion& question,
               std::span<const Token> rest) {
  session.ResetTimes();
  session.method().ResetCounters();
  if (options.question == "dense") {
    session.Prefill(rest);
  } else {
    for (const Token token : rest) {
      StopIfInterrupted();
      session.Decode(token);
    }
  }
  EvalAnswer answer;
  answer.task = question.task;
  answer.question = question.text;
  answer.expected = question.expected;
  answer.n_prompt_tokens = session.n_tokens();
  answer.generation = Generate(session, {options.predict, {}},
                               [](Token, std::string_view) { return !Interrupted(); });
  StopIfInterrupted();  // an answer that was cut short says nothing
  answer.right = IsRight(answer.generation.text, question.expected);
  answer.times = session.times();
  answer.counters = session.method().counters();
  return answer;
}

// All questions of one document by one method, from the rows of the shared tokens.
void AskMethod(Session& session, const EvalAnswersOptions& options, const EvalDocument& document,
               const Prepared& prepared, std::size_t index, EvalMethod* method) {
  const auto shared = static_cast<std::int64_t>(prepared.shared.size());
  session.Truncate(shared);
  session.SetMethod(method->label);
  session.BuildIndex();
  method->spec = session.method().spec();
  for (std::size_t i = 0; i < document.questions.size(); ++i) {
    StopIfInterrupted();
    session.Truncate(shared);
    method->answers.push_back(Ask(session, options, document.questions[i], prepared.rest[i]));
    method->answers.back().document = index;
  }
}

// "12 of 20 right" of the answers from `first` on.
Score ScoreFrom(const EvalMethod& method, std::size_t first) {
  Score score;
  for (std::size_t i = first; i < method.answers.size(); ++i) score.Add(method.answers[i].right);
  return score;
}

void RunDocument(Session& session, const EvalAnswersOptions& options, const EvalDocument& document,
                 const Prepared& prepared, const std::string& position, EvalReport* report) {
  {
    Progress progress("document " + position, "tokens");
    session.Prefill(prepared.shared, [&](std::int64_t done, std::int64_t total) {
      progress.Update(done, total);
      return !Interrupted();
    });
  }
  report->documents.push_back({document.path, static_cast<std::int64_t>(prepared.shared.size()),
                               session.times().prefill_s});
  for (EvalMethod& method : report->methods) {
    const std::size_t before = method.answers.size();
    AskMethod(session, options, document, prepared, report->documents.size() - 1, &method);
    const Score here = ScoreFrom(method, before);
    const Score all = ScoreFrom(method, 0);
    std::fprintf(stderr, "document %s, %s: %s of %s right; so far %s of %s questions, share %.3f\n",
                 position.c_str(), method.label.c_str(), Grouped(here.right).c_str(),
                 Grouped(here.questions).c_str(), Grouped(all.questions).c_str(),
                 Grouped(report->n_questions).c_str(), all.share());
  }
}

// A session must have room for whichever method's index is largest.
std::string LargestIndex(const Model& model, const std::vector<EvalMethod>& methods,
                         std::int64_t ctx) {
  const auto bytes = [&](const EvalMethod& method) {
    return IndexBytes(MethodSpec::Parse(method.label), model.info().n_layers, model.info().heads,
                      ctx);
  };
  return std::max_element(
             methods.begin(), methods.end(),
             [&](const EvalMethod& a, const EvalMethod& b) { return bytes(a) < bytes(b); })
      ->label;
}

EvalReport Execute(const EvalAnswersOptions& options, const std::vector<std::string>& specs) {
  const std::vector<EvalDocument> documents = ReadFiles(options);
  const auto model = Model::Open(options.model);
  const bool chat = UseChat(*model, options.no_chat);
  std::vector<Prepared> prepared;
  prepared.reserve(documents.size());
  for (const EvalDocument& document : documents)
    prepared.push_back(Prepare(*model, document, chat));

  EvalReport report;
  report.model = model->info();
  report.ctx_size = ContextSize(*model, prepared, options.predict);
  for (const EvalDocument& document : documents)
    report.n_questions += static_cast<std::int64_t>(document.questions.size());
  for (const std::string& spec : specs) report.methods.push_back({spec, "", {}});
  SessionOptions session_options;
  session_options.ctx_size = report.ctx_size;
  session_options.backend = options.backend;
  session_options.n_threads = options.threads;
  session_options.calibration = LoadStatistics(options.statistics_file);
  session_options.method = LargestIndex(*model, report.methods, report.ctx_size);
  try {
    for (std::size_t i = 0; i < documents.size(); ++i) {
      StopIfInterrupted();
      Session session(model, session_options);
      report.backend = std::string(session.backend().name());
      report.threads = session.backend().n_threads();
      RunDocument(session, options, documents[i], prepared[i],
                  std::to_string(i + 1) + "/" + std::to_string(documents.size()), &report);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    std::fprintf(stderr, "fathom: interrupted; the answers so far are reported\n");
  }
  report.interrupted = Interrupted();
  return report;
}

void WarnOfCutAnswers(const EvalReport& report, std::int64_t predict) {
  std::int64_t cut = 0;
  for (const EvalMethod& method : report.methods) {
    cut +=
        std::count_if(method.answers.begin(), method.answers.end(), [](const EvalAnswer& answer) {
          return answer.generation.stop == StopReason::kLength && !answer.right;
        });
  }
  if (cut == 0) return;
  std::fprintf(stderr, "fathom: %s wrong answers were cut at %s tokens; -n gives them more\n",
               Grouped(cut).c_str(), Grouped(predict).c_str());
}

int EvalAnswers(const EvalAnswersOptions& options) {
  const std::vector<std::string> specs = ParseSpecLists(options.methods);
  // Found out now rather than after the work.
  if (!options.output.empty()) CheckWritable(options.output);
  const EvalReport report = Execute(options, specs);
  WarnOfCutAnswers(report, options.predict);
  const std::string json = JsonText(EvalJson(report, options));
  if (!options.output.empty()) WriteText(options.output, json);
  WriteOut(options.json ? json : EvalTables(report));
  return report.interrupted ? kExitInterrupted : kExitOk;
}

}  // namespace

void AddEvalAnswersCommand(Command eval, int* exit_code) {
  auto options = std::make_shared<EvalAnswersOptions>();
  Command answers = eval.AddCommand("answers", "Share of questions answered right, by method");
  answers.AddOption("questions", options->files, "question files (see docs/benchmarking.md)")
      .TypeName("QUESTIONS.json")
      .Required();
  answers.AddOption("-m,--model", options->model, "GGUF model").TypeName("FILE").Required();
  answers.AddOption("--methods", options->methods, "method specs, separated by commas")
      .TypeName("SPEC,SPEC...")
      .OneValueEach()
      .Required();
  answers.AddOption("-n,--predict", options->predict, "longest answer in tokens")
      .TypeName("N")
      .ShowDefault()
      .InRange(1, 1 << 20);
  answers
      .AddOption("--question", options->question,
                 "how a question's own tokens attend: sparse (by the method) or dense")
      .TypeName("HOW")
      .ShowDefault()
      .OneOf({"sparse", "dense"});
  AddMachineOptions(answers, &options->threads, &options->backend);
  answers.AddOption("--stats-file", options->statistics_file, kStatsFileHelp).TypeName("FILE");
  answers.AddOption("--limit", options->limit, "ask only the first N questions; 0 asks all")
      .TypeName("N")
      .ShowDefault()
      .InRange(0, 1 << 30);
  answers.AddFlag("--no-chat", options->no_chat, "plain text; no chat template");
  answers.AddFlag("--json", options->json, "print one JSON document with every answer");
  answers.AddOption("-o,--output", options->output, "also write the JSON document to a file")
      .TypeName("FILE");
  answers.OnRun([options, exit_code] { *exit_code = EvalAnswers(*options); });
}

}  // namespace fathom::cli
