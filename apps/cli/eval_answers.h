// SPDX-License-Identifier: MIT
// `fathom eval answers`: shares of right answers by method.
//
// Each document is prefilled densely once; each method then indexes its rows and answers all of its
// questions from there. By default a question's own tokens are decoded by the method too, so that
// nothing after the document is dense.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common.h"
#include "fathom/fathom.h"

namespace fathom::cli {

struct EvalAnswersOptions {
  std::vector<std::string> files;
  std::string model;
  std::vector<std::string> methods;  // lists of specs, see SplitSpecs
  std::int64_t predict = 128;
  std::string question = "sparse";  // how a question's tokens are fed: "sparse" or "dense"
  int threads = 0;
  std::string backend = "cpu";
  std::string statistics_file;  // empty: the prefill's own
  std::int64_t limit = 0;       // ask only the first questions; 0: all
  bool no_chat = false;
  bool json = false;
  std::string output;  // file for the JSON document, empty for none
};

// One answer of one method.
struct EvalAnswer {
  std::size_t document = 0;  // index into EvalReport::documents
  std::string task;
  std::string question;
  std::vector<std::string> expected;
  std::int64_t n_prompt_tokens = 0;  // document and question
  Generation generation;
  bool right = false;
  SessionTimes times;  // of the question and the answer
  MethodCounters counters;
};

struct EvalMethod {
  std::string label;                // the spec as it was given
  std::string spec;                 // canonical, defaults filled in; empty until the first document
  std::vector<EvalAnswer> answers;  // in the same order of questions for all methods
};

struct EvalDocumentRun {
  std::string path;
  std::int64_t shared_tokens = 0;  // prefilled once
  double prefill_s = 0;
};

struct EvalReport {
  ModelInfo model;
  std::string backend;
  int threads = 0;
  std::int64_t ctx_size = 0;
  std::int64_t n_questions = 0;  // that the files hold, or the limit
  bool interrupted = false;
  std::vector<EvalDocumentRun> documents;
  std::vector<EvalMethod> methods;
};

std::string EvalTables(const EvalReport& report);
nlohmann::json EvalJson(const EvalReport& report, const EvalAnswersOptions& options);

void AddEvalAnswersCommand(Command eval, int* exit_code);

}  // namespace fathom::cli
