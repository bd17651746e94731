// SPDX-License-Identifier: MIT
// Files of documents with questions whose answers are right or wrong without doubt.
//
// The file is a JSON array of {"document": path beside the file, "task": name, "tokens": N,
// "questions": [{"question": text, "expected": [text, ...]}, ...]}. An answer is right when it
// contains every expected text. Entries with the same document (one per task) share its prefill.
// "tokens" is information for readers and may be left out; unknown keys are ignored.
#pragma once

#include <string>
#include <vector>

namespace fathom::cli {

struct EvalQuestion {
  std::string task;
  std::string text;
  std::vector<std::string> expected;  // at least one, none empty
};

struct EvalDocument {
  std::string path;                     // as it can be opened from the working folder
  std::string text;                     // not blank
  std::vector<EvalQuestion> questions;  // at least one
};

// Reads a question file and its documents, in the order in which documents are first named.
// Throws Error(kIo) for what cannot be read, Error(kCorrupt) for a file of the wrong shape; the
// message names the file, the entry's index and the key.
std::vector<EvalDocument> ReadQuestionFile(const std::string& path);

// Whether the answer contains every expected text.
bool IsRight(const std::string& answer, const std::vector<std::string>& expected);

}  // namespace fathom::cli
