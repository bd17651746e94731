// SPDX-License-Identifier: MIT
#include <algorithm>
#include <nlohmann/json.hpp>

#include "common.h"
#include "run.h"
#include "table.h"

namespace fathom::cli {
namespace {

// Sums over the answers of one method.
struct Totals {
  SessionTimes times;
  MethodCounters counters;

  double steps() const { return static_cast<double>(std::max<std::int64_t>(counters.steps, 1)); }
};

Totals Sum(const MethodRun& run) {
  Totals totals;
  for (const Answer& answer : run.answers) {
    totals.times.decode_s += answer.times.decode_s;
    totals.times.decode_attention_s += answer.times.decode_attention_s;
    totals.times.decode_tokens += answer.times.decode_tokens;
    totals.times.device_decode_tokens += answer.times.device_decode_tokens;
    totals.counters += answer.counters;
  }
  return totals;
}

double Rate(std::int64_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

// Of the tokens whose attention was timed: not of those whose whole step was on a device.
double AttentionMs(const Totals& totals) {
  const std::int64_t timed = totals.times.decode_tokens - totals.times.device_decode_tokens;
  const auto tokens = static_cast<double>(std::max<std::int64_t>(timed, 1));
  return totals.times.decode_attention_s * 1000 / tokens;
}

// The first position where two token sequences differ, -1 when they are equal.
std::int64_t PartsAt(const Generation& a, const Generation& b) {
  const auto [at, other] =
      std::mismatch(a.tokens.begin(), a.tokens.end(), b.tokens.begin(), b.tokens.end());
  if (at == a.tokens.end() && other == b.tokens.end()) return -1;
  return at - a.tokens.begin();
}

// A method that reads nothing of a kind has no number for it.
std::string CountOrDash(double value, const std::string& text) { return value > 0 ? text : "-"; }

std::string SecondsText(double seconds) {
  return seconds < 1 ? Fixed(seconds * 1000, 0) + " ms" : Fixed(seconds, 1) + " s";
}

// What two texts begin with, cut at a whole UTF-8 character.
std::string CommonText(const std::string& a, const std::string& b) {
  auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
  while (end != a.begin() && end != a.end() && continues(*end)) --end;
  return {a.begin(), end};
}

nlohmann::json SessionJson(const SessionReport& session) {
  return {{"name", session.name},
          {"found_tokens", session.found_tokens},
          {"reused_tokens", session.reused_tokens},
          {"saved_tokens", session.saved_tokens},
          {"bytes", session.bytes},
          {"resume_seconds", session.resume_s},
          {"first_token_seconds", session.first_token_s},
          {"save_seconds", session.save_s}};
}

}  // namespace

std::string DecodeAttentionText(const RunReport& report) {
  std::string text;
  for (const MethodRun& run : report.runs) {
    const Totals totals = Sum(run);
    if (totals.times.decode_tokens == 0) continue;
    text += "fathom: " + run.label + ": decode attended on the GPU for " +
            Grouped(totals.times.device_decode_tokens) + " of " +
            Grouped(totals.times.decode_tokens) + " tokens, last on " + run.decode_attention + "\n";
  }
  return text;
}

std::string StatsTable(const RunReport& report) {
  std::vector<std::string> header = {""};
  std::vector<Totals> totals;
  for (const MethodRun& run : report.runs) {
    header.push_back(run.label);
    totals.push_back(Sum(run));
  }
  Table table(header);
  const auto add = [&](const std::string& name, const auto& cell) {
    std::vector<std::string> row = {name};
    for (std::size_t i = 0; i < totals.size(); ++i) row.push_back(cell(totals[i], report.runs[i]));
    table.Add(row);
  };
  add("decode, tokens/s", [](const Totals& t, const MethodRun&) {
    return Fixed(Rate(t.times.decode_tokens, t.times.decode_s), 1);
  });
  add("attention, ms/token", [](const Totals& t, const MethodRun&) {
    const double ms = AttentionMs(t);
    return CountOrDash(ms, Fixed(ms, 3));
  });
  add("read bits/token/KV head", [](const Totals& t, const MethodRun&) {
    return CountOrDash(t.counters.mean_read_bits(), Fixed(t.counters.mean_read_bits(), 1));
  });
  add("index read/step", [](const Totals& t, const MethodRun&) {
    const double bytes = static_cast<double>(t.counters.index_bytes) / t.steps();
    return CountOrDash(bytes, ByteText(bytes));
  });
  add("rows read/step", [](const Totals& t, const MethodRun&) {
    return ByteText(static_cast<double>(t.counters.row_bytes) / t.steps());
  });
  add("rows/step/KV head (union)", [](const Totals& t, const MethodRun&) {
    return Fixed(static_cast<double>(t.counters.rows) /
                     static_cast<double>(std::max<std::int64_t>(t.counters.calls, 1)),
                 1);
  });
  add("index held", [](const Totals&, const MethodRun& run) {
    const auto bytes = static_cast<double>(run.index_bytes);
    return CountOrDash(bytes, ByteText(bytes));
  });
  add("index built in, s",
      [](const Totals&, const MethodRun& run) { return Fixed(run.index_s, 2); });
  std::string text = table.ToString();
  text += "prefill: " + Grouped(report.prefill.prefill_tokens) + " tokens in " +
          SecondsText(report.prefill.prefill_s) + ", " +
          Fixed(Rate(report.prefill.prefill_tokens, report.prefill.prefill_s), 0) + " tokens/s (" +
          Fixed(100 * report.prefill.prefill_attention_s / std::max(report.prefill.prefill_s, 1e-9),
                0) +
          " % attention); rows held: " + ByteText(static_cast<double>(report.rows_bytes)) + "; " +
          report.backend + ", " + std::to_string(report.threads) + " threads\n";
  return text;
}

std::string ComparisonText(const RunReport& report) {
  const MethodRun& first = report.runs.at(0);
  const MethodRun& second = report.runs.at(1);
  std::string text;
  for (std::size_t i = 0; i < std::min(first.answers.size(), second.answers.size()); ++i) {
    const Generation& a = first.answers[i].generation;
    const Generation& b = second.answers[i].generation;
    const std::int64_t at = PartsAt(a, b);
    if (first.answers.size() > 1) text += "question " + std::to_string(i + 1) + ": ";
    if (at < 0) {
      text += "same answer, " + std::to_string(a.tokens.size()) + " tokens\n";
      continue;
    }
    text += "the answers part at token " + std::to_string(at + 1) + ", after \"" +
            CommonText(a.text, b.text) + "\"\n";
  }
  for (const MethodRun& run : report.runs) {
    const Totals totals = Sum(run);
    text += run.label + ": " + Fixed(Rate(totals.times.decode_tokens, totals.times.decode_s), 1) +
            " tokens/s";
    if (const double ms = AttentionMs(totals); ms > 0) {
      text += ", attention " + Fixed(ms, 3) + " ms/token";
    }
    text += "\n";
  }
  return text;
}

nlohmann::json ReportJson(const RunReport& report) {
  nlohmann::json json;
  json["model"] = {{"path", report.model.path},
                   {"name", report.model.name},
                   {"architecture", report.model.architecture}};
  json["backend"] = report.backend;
  json["device"] = report.device;
  json["threads"] = report.threads;
  json["ctx_size"] = report.ctx_size;
  json["stats_file"] = report.statistics_file;
  json["document_bytes"] = report.document_bytes;
  json["interrupted"] = report.interrupted;
  json["rows_bytes"] = report.rows_bytes;
  json["prefill"] = {{"n_tokens", report.prefill.prefill_tokens},
                     {"seconds", report.prefill.prefill_s},
                     {"attention_seconds", report.prefill.prefill_attention_s}};
  if (!report.session.name.empty()) json["session"] = SessionJson(report.session);
  json["runs"] = nlohmann::json::array();
  for (const MethodRun& run : report.runs) {
    nlohmann::json answers = nlohmann::json::array();
    for (const Answer& answer : run.answers) {
      answers.push_back({{"question", answer.question},
                         {"n_prompt_tokens", answer.n_prompt_tokens},
                         {"text", answer.generation.text},
                         {"tokens", answer.generation.tokens},
                         {"stop", StopName(answer.generation.stop)},
                         {"question_prefill_seconds", answer.times.prefill_s},
                         {"decode_seconds", answer.times.decode_s},
                         {"decode_attention_seconds", answer.times.decode_attention_s},
                         {"decode_steps", answer.times.decode_tokens},
                         {"device_decode_steps", answer.times.device_decode_tokens},
                         {"sparse_calls", answer.counters.sparse_calls},
                         {"calls", answer.counters.calls},
                         {"read_bits", answer.counters.mean_read_bits()},
                         {"index_bytes", answer.counters.index_bytes},
                         {"rows", answer.counters.rows},
                         {"row_bytes", answer.counters.row_bytes}});
    }
    const Totals totals = Sum(run);
    json["runs"].push_back(
        {{"method", run.spec},
         {"spec", run.label},
         {"index_seconds", run.index_s},
         {"index_held_bytes", run.index_bytes},
         {"decode_attention", run.decode_attention},
         {"decode_tokens_per_second", Rate(totals.times.decode_tokens, totals.times.decode_s)},
         {"attention_ms_per_token", AttentionMs(totals)},
         {"read_bits", totals.counters.mean_read_bits()},
         {"index_bytes_per_step",
          static_cast<double>(totals.counters.index_bytes) / totals.steps()},
         {"row_bytes_per_step", static_cast<double>(totals.counters.row_bytes) / totals.steps()},
         {"answers", answers}});
  }
  return json;
}

}  // namespace fathom::cli
