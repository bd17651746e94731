// SPDX-License-Identifier: MIT
#include <algorithm>
#include <nlohmann/json.hpp>

#include "eval_answers.h"
#include "eval_score.h"
#include "table.h"

namespace fathom::cli {
namespace {

constexpr const char* kReference = "dense";  // what methods are compared with, when it was run

// What one method did over all of its answers.
struct Summary {
  Score score;
  std::vector<bool> right;
  MethodCounters counters;
  double decode_s = 0;
  std::int64_t decode_tokens = 0;
  double decode_attention_s = 0;

  // Rows per step and KV head, union over the group.
  double rows_per_step() const { return Ratio(static_cast<double>(counters.rows), counters.calls); }
  double decode_ms() const { return 1000 * Ratio(decode_s, decode_tokens); }
  double attention_ms() const { return 1000 * Ratio(decode_attention_s, decode_tokens); }

  static double Ratio(double value, std::int64_t count) {
    return count > 0 ? value / static_cast<double>(count) : 0;
  }
};

Summary Summarize(const EvalMethod& method) {
  Summary summary;
  for (const EvalAnswer& answer : method.answers) {
    summary.score.Add(answer.right);
    summary.right.push_back(answer.right);
    summary.counters += answer.counters;
    summary.decode_s += answer.times.decode_s;
    summary.decode_tokens += answer.times.decode_tokens;
    summary.decode_attention_s += answer.times.decode_attention_s;
  }
  return summary;
}

Score TaskScore(const EvalMethod& method, const std::string& task) {
  Score score;
  for (const EvalAnswer& answer : method.answers)
    if (answer.task == task) score.Add(answer.right);
  return score;
}

// Tasks in the order in which they first occur.
std::vector<std::string> Tasks(const EvalReport& report) {
  std::vector<std::string> tasks;
  for (const EvalMethod& method : report.methods) {
    for (const EvalAnswer& answer : method.answers) {
      if (std::find(tasks.begin(), tasks.end(), answer.task) == tasks.end())
        tasks.push_back(answer.task);
    }
  }
  return tasks;
}

// The reference's answers, null when it was not among the methods.
const EvalMethod* Reference(const EvalReport& report) {
  const auto found =
      std::find_if(report.methods.begin(), report.methods.end(),
                   [](const EvalMethod& method) { return method.label == kReference; });
  return found == report.methods.end() ? nullptr : &*found;
}

std::string DifferenceText(const PairedDifference& difference) {
  if (difference.questions < 2) return "-";
  return (difference.mean > 0 ? "+" : "") + Fixed(difference.mean, 3) + " +- " +
         Fixed(difference.standard_error, 3);
}

std::string MethodTable(const EvalReport& report) {
  Table table({"method", "questions", "right", "share", "std error", "vs dense", "read bits",
               "rows/step", "decode ms/token"});
  const EvalMethod* reference = Reference(report);
  for (const EvalMethod& method : report.methods) {
    const Summary summary = Summarize(method);
    const bool answered = summary.score.questions > 0;
    const bool compared = answered && reference != nullptr && reference != &method;
    const double bits = summary.counters.mean_read_bits();
    table.Add({method.label, Grouped(summary.score.questions), Grouped(summary.score.right),
               answered ? Fixed(summary.score.share(), 3) : "-",
               answered ? Fixed(summary.score.standard_error(), 3) : "-",
               compared ? DifferenceText(Compare(summary.right, Summarize(*reference).right)) : "-",
               bits > 0 ? Fixed(bits, 1) : "-", answered ? Fixed(summary.rows_per_step(), 1) : "-",
               answered ? Fixed(summary.decode_ms(), 2) : "-"});
  }
  return table.ToString();
}

std::string TaskTable(const EvalReport& report) {
  std::vector<std::string> header = {"share by task", "questions"};
  for (const EvalMethod& method : report.methods) header.push_back(method.label);
  Table table(header);
  for (const std::string& task : Tasks(report)) {
    std::vector<std::string> row = {task,
                                    Grouped(TaskScore(report.methods.front(), task).questions)};
    for (const EvalMethod& method : report.methods) {
      const Score score = TaskScore(method, task);
      row.push_back(score.questions > 0 ? Fixed(score.share(), 3) : "-");
    }
    table.Add(row);
  }
  return table.ToString();
}

nlohmann::json ScoreJson(const Score& score) {
  return {{"questions", score.questions},
          {"right", score.right},
          {"share", score.share()},
          {"standard_error", score.standard_error()}};
}

nlohmann::json MethodJson(const EvalReport& report, const EvalMethod& method,
                          const std::vector<std::string>& tasks) {
  const Summary summary = Summarize(method);
  nlohmann::json json = ScoreJson(summary.score);
  json["spec"] = method.label;
  json["method"] = method.spec;
  json["read_bits"] = summary.counters.mean_read_bits();
  json["rows_per_step"] = summary.rows_per_step();
  json["decode_ms_per_token"] = summary.decode_ms();
  json["attention_ms_per_token"] = summary.attention_ms();
  const EvalMethod* reference = Reference(report);
  if (reference != nullptr && reference != &method) {
    const PairedDifference difference = Compare(summary.right, Summarize(*reference).right);
    json["versus_dense"] = {{"questions", difference.questions},
                            {"difference", difference.mean},
                            {"standard_error", difference.standard_error}};
  }
  json["tasks"] = nlohmann::json::array();
  for (const std::string& task : tasks) {
    json["tasks"].push_back(ScoreJson(TaskScore(method, task)));
    json["tasks"].back()["task"] = task;
  }
  return json;
}

nlohmann::json AnswerJson(const EvalReport& report, const EvalMethod& method,
                          const EvalAnswer& answer) {
  return {{"document", report.documents.at(answer.document).path},
          {"task", answer.task},
          {"question", answer.question},
          {"expected", answer.expected},
          {"spec", method.label},
          {"text", answer.generation.text},
          {"right", answer.right},
          {"stop", StopName(answer.generation.stop)},
          {"n_prompt_tokens", answer.n_prompt_tokens},
          {"n_answer_tokens", answer.generation.tokens.size()},
          {"decode_steps", answer.times.decode_tokens},
          {"decode_seconds", answer.times.decode_s},
          {"calls", answer.counters.calls},
          {"sparse_calls", answer.counters.sparse_calls},
          {"read_bits", answer.counters.mean_read_bits()},
          {"rows", answer.counters.rows}};
}

}  // namespace

std::string EvalTables(const EvalReport& report) {
  std::string text = MethodTable(report) + "\n" + TaskTable(report);
  return text + report.model.path + ", " + report.backend + ", " + std::to_string(report.threads) +
         " threads" + (report.interrupted ? "; interrupted\n" : "\n");
}

nlohmann::json EvalJson(const EvalReport& report, const EvalAnswersOptions& options) {
  nlohmann::json json;
  json["model"] = {{"path", report.model.path},
                   {"name", report.model.name},
                   {"architecture", report.model.architecture}};
  json["files"] = options.files;
  json["question"] = options.question;
  json["predict"] = options.predict;
  json["backend"] = report.backend;
  json["stats_file"] = options.statistics_file;
  json["threads"] = report.threads;
  json["ctx_size"] = report.ctx_size;
  json["interrupted"] = report.interrupted;
  json["documents"] = nlohmann::json::array();
  for (const EvalDocumentRun& document : report.documents) {
    json["documents"].push_back({{"path", document.path},
                                 {"n_tokens", document.shared_tokens},
                                 {"prefill_seconds", document.prefill_s}});
  }
  json["methods"] = nlohmann::json::array();
  json["answers"] = nlohmann::json::array();
  const std::vector<std::string> tasks = Tasks(report);
  for (const EvalMethod& method : report.methods) {
    json["methods"].push_back(MethodJson(report, method, tasks));
    for (const EvalAnswer& answer : method.answers)
      json["answers"].push_back(AnswerJson(report, method, answer));
  }
  return json;
}

}  // namespace fathom::cli
