// SPDX-License-Identifier: MIT
#include "question_file.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "common.h"
#include "prompts.h"

namespace fathom::cli {
namespace {

using Json = nlohmann::json;

// One place in the file, for messages: "set.json: [2].questions[0]".
class Place {
 public:
  explicit Place(std::string text) : text_(std::move(text)) {}
  Place Index(std::size_t i) const { return Place(text_ + "[" + std::to_string(i) + "]"); }
  Place Key(const std::string& key) const { return Place(text_ + "." + key); }

  [[noreturn]] void Fail(const std::string& what) const {
    throw Error(ErrorCode::kCorrupt, text_ + " " + what);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

const Json& Member(const Json& object, const std::string& key, const Place& place) {
  const auto found = object.find(key);
  if (found == object.end()) place.Fail("has no key '" + key + "'");
  return *found;
}

void CheckObject(const Json& json, const Place& place) {
  if (!json.is_object()) {
    place.Fail(std::string("must be an object, not ") + json.type_name());
  }
}

const Json& Array(const Json& json, const Place& place) {
  if (!json.is_array()) place.Fail(std::string("must be an array, not ") + json.type_name());
  if (json.empty()) place.Fail("is empty; it needs at least one entry");
  return json;
}

std::string Text(const Json& json, const Place& place) {
  if (!json.is_string()) place.Fail(std::string("must be a string, not ") + json.type_name());
  auto text = json.get<std::string>();
  if (TrimEnd(text).empty()) place.Fail("is empty; give some text");
  return text;
}

EvalQuestion ReadQuestion(const Json& json, const std::string& task, const Place& place) {
  CheckObject(json, place);
  EvalQuestion question;
  question.task = task;
  question.text = Text(Member(json, "question", place), place.Key("question"));
  const Place expected = place.Key("expected");
  const Json& texts = Array(Member(json, "expected", place), expected);
  for (std::size_t i = 0; i < texts.size(); ++i)
    question.expected.push_back(Text(texts[i], expected.Index(i)));
  return question;
}

std::string ReadDocument(const std::string& path, const Place& place) {
  std::string text;
  try {
    text = ReadText(path);
  } catch (const Error& error) {
    throw Error(error.code(), place.text() + ": " + error.what());
  }
  if (TrimEnd(text).empty()) place.Fail("names '" + path + "', which is empty");
  return text;
}

Json Parse(const std::string& path) {
  try {
    return Json::parse(ReadText(path));
  } catch (const Json::parse_error& error) {
    throw Error(ErrorCode::kCorrupt,
                path + ": not valid JSON at byte " + std::to_string(error.byte));
  }
}

}  // namespace

std::vector<EvalDocument> ReadQuestionFile(const std::string& path) {
  const Json json = Parse(path);
  const Place file(path + ": ");
  Array(json, Place(path + ": the file"));
  std::vector<EvalDocument> documents;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const Json& entry = json[i];
    const Place place = file.Index(i);
    CheckObject(entry, place);
    const Place named = place.Key("document");
    const std::string name = Text(Member(entry, "document", place), named);
    const std::string where = (std::filesystem::path(path).parent_path() / name).string();
    const std::string task = Text(Member(entry, "task", place), place.Key("task"));
    auto document = std::find_if(documents.begin(), documents.end(),
                                 [&](const EvalDocument& d) { return d.path == where; });
    if (document == documents.end()) {
      documents.push_back({where, ReadDocument(where, named), {}});
      document = documents.end() - 1;
    }
    const Place list = place.Key("questions");
    const Json& questions = Array(Member(entry, "questions", place), list);
    for (std::size_t k = 0; k < questions.size(); ++k)
      document->questions.push_back(ReadQuestion(questions[k], task, list.Index(k)));
  }
  return documents;
}

bool IsRight(const std::string& answer, const std::vector<std::string>& expected) {
  return std::all_of(expected.begin(), expected.end(), [&](const std::string& text) {
    return answer.find(text) != std::string::npos;
  });
}

}  // namespace fathom::cli
