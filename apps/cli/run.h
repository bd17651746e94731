// SPDX-License-Identifier: MIT
// `fathom run`: what it is asked and what it found.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "fathom/fathom.h"

namespace fathom::cli {

struct RunOptions {
  std::string model;
  std::string file;  // document, "-" for standard input, empty for none
  std::vector<std::string> prompts;
  std::string ctx_size;  // empty: what the prompts need
  std::int64_t predict = 256;
  int threads = 0;
  std::string backend = "cpu";
  std::string device = "cpu";
  std::string decode_attention = "device";
  std::string method = "fathom:bits=28,k=512";
  bool method_given = false;
  std::string compare;          // second method, empty for none
  std::string statistics_file;  // empty: the prefill's own
  SamplingOptions sampling;
  std::string session;         // kept under this name; empty: not kept
  std::string session_dir;     // empty: the default
  std::string session_budget;  // empty: no limit
  double session_checkpoint = 30;
  bool session_replace = false;
  bool no_chat = false;
  bool stats = false;
  bool json = false;
};

struct Answer {
  std::string question;
  std::int64_t n_prompt_tokens = 0;
  Generation generation;
  SessionTimes times;  // of this question and its answer alone
  MethodCounters counters;
};

struct MethodRun {
  std::string label;  // the spec as it was given
  std::string spec;   // canonical, defaults filled in
  double index_s = 0;
  std::int64_t index_bytes = 0;
  std::string decode_attention;  // of the last token: Session::decode_attention
  std::vector<Answer> answers;
};

// What was kept on disk.
struct SessionReport {
  std::string name;                // empty: nothing
  std::int64_t found_tokens = 0;   // that were there
  std::int64_t reused_tokens = 0;  // of those, that the first prompt begins with
  std::int64_t saved_tokens = 0;
  std::int64_t bytes = 0;
  double resume_s = 0;       // until the session could go on
  double first_token_s = 0;  // from the beginning of that to the first token of the first answer
  double save_s = 0;         // of all saves together
};

struct RunReport {
  ModelInfo model;
  std::string backend;
  std::string device;
  int threads = 0;
  std::int64_t ctx_size = 0;
  std::string statistics_file;  // empty: the prefill's own
  std::int64_t document_bytes = 0;
  std::int64_t shared_tokens = 0;  // prefilled once for all questions and methods
  SessionTimes prefill;            // of those
  std::int64_t rows_bytes = 0;     // at the end of the run
  bool interrupted = false;
  SessionReport session;
  std::vector<MethodRun> runs;
};

// Where decode attended, a line for every method; of runs with --device cuda.
std::string DecodeAttentionText(const RunReport& report);
std::string StatsTable(const RunReport& report);
// Where the second method's answers part from the first's, and both speeds.
std::string ComparisonText(const RunReport& report);
nlohmann::json ReportJson(const RunReport& report);

}  // namespace fathom::cli
