// SPDX-License-Identifier: MIT
// `fathom eval error` without the evaluation: options, lists of k, presets, and what is written of
// a report made by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <vector>

#include "../apps/cli/eval_error.h"
#include "../apps/cli/eval_presets.h"
#include "../apps/cli/eval_report.h"
#include "../apps/cli/svg_labels.h"
#include "support/random_data.h"
#include "support/temp_dir.h"

namespace fathom::cli {
namespace {

// Runs the command in this process; what it throws passes through.
int RunError(const std::string& arguments, std::string* out = nullptr) {
  CommandLine line("eval", "eval");
  int exit_code = -1;
  AddEvalErrorCommand(line.root(), &exit_code);
  std::vector<std::string> words = {"eval", "error"};
  std::istringstream stream(arguments);
  for (std::string word; stream >> word;) words.push_back(word);
  std::vector<const char*> argv;
  argv.reserve(words.size());
  for (const std::string& word : words) argv.push_back(word.c_str());
  testing::internal::CaptureStdout();
  try {
    line.Run(static_cast<int>(argv.size()), argv.data());
  } catch (...) {
    testing::internal::GetCapturedStdout();
    throw;
  }
  const std::string text = testing::internal::GetCapturedStdout();
  if (out != nullptr) *out = text;
  return exit_code;
}

// The message of the usage error that a call ends with.
template <typename Call>
std::string UsageError(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

void ExpectHolds(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in\n" << text;
}

std::string WriteTemporary(const std::string& name, const std::string& text) {
  static const test::TempDir kDir;
  static int count = 0;
  const std::string file = std::to_string(count++) + "/" + name;
  kDir.Write(file, text);
  return (kDir.path() / file).string();
}

ErrorRow Row(const std::string& method, std::int64_t k, double bits, double error) {
  ErrorRow row;
  row.method = method;
  row.spec = method;
  row.k = k;
  row.read_bits = bits;
  row.mean = error;
  row.mean_se = error / 50;
  row.median = error / 2;
  row.p99 = error * 3;
  row.recall = 0.75;
  row.mass = 0.9876;
  row.stored_bytes = 68;
  row.rows = 300.25;
  row.samples = 1234;
  row.layer_mean = {error / 2, error * 1.5};
  return row;
}

ErrorRun MadeRun() {
  ErrorRun run;
  ErrorReport& report = run.report;
  report.capture = "folder/a <b> & \"c\".safetensors";
  report.geometry.n_tokens = 8192;
  report.geometry.heads = {12, 2, 128};
  report.geometry.layers = {0, 3, 7};
  report.geometry.q_positions = {8190, 8191};
  report.geometry.model = "Model";
  report.geometry.has_qk_norm = true;
  report.layers = {0, 7};
  report.n_positions = 2;
  report.built_tokens = 8190;
  for (const std::int64_t k : {131, 492}) {
    const double scale = k == 131 ? 1 : 0.5;
    report.rows.push_back(Row("exact", k, 2048, .1 * scale));
    report.rows.push_back(Row("sparq:r=16", k, 68, .2 * scale));
    report.rows.push_back(Row("landmark", k, 256, .9 * scale));
    report.rows.push_back(Row("full4", k, 544, .05 * scale));
    report.rows.push_back(Row("streaming", k, 0, .8 * scale));
    report.rows.push_back(Row("fathom:bits=20", k, 20, .4 * scale));
    report.rows.push_back(Row("fathom:bits=30", k, 30, .1 * scale));
    report.rows.push_back(Row("fathom:bits=28,residual=off", k, 28, .3 * scale));
  }
  return run;
}

TEST(EvalErrorK, NumbersAndShares) {
  EXPECT_EQ(ParseK({"128", "1.6%"}, 32768, false), (std::vector<std::int64_t>{128, 524}));
  // Ascending, without repeats; 2k is 2048.
  EXPECT_EQ(ParseK({"2k", "37", "128", "128"}, 100000, false),
            (std::vector<std::int64_t>{37, 128, 2048}));
  EXPECT_EQ(ParseK({"50%"}, 1001, false), (std::vector<std::int64_t>{501}));
}

TEST(EvalErrorK, SharesThatComeToTooFew) {
  // 0.4 % of 8,192 is 33.
  EXPECT_EQ(ParseK(DefaultK(), 8192, true), (std::vector<std::int64_t>{131, 492}));
  EXPECT_EQ(ParseK(DefaultK(), 131072, true), (std::vector<std::int64_t>{524, 2097, 7864}));
  ExpectHolds(UsageError([] { ParseK({"0.4%"}, 8192, false); }), {"0.4% of 8,192", "33", "37"});
  ExpectHolds(UsageError([] { ParseK(DefaultK(), 300, true); }), {"300", "--k"});
  ExpectHolds(UsageError([] { ParseK({"36"}, 8192, false); }), {"36", "37"});
  // A number is never skipped.
  ExpectHolds(UsageError([] { ParseK({"36", "1.6%"}, 8192, true); }), {"36", "37"});
}

TEST(EvalErrorK, BadTexts) {
  for (const char* bad : {"", "x", "%", "1.6 %", "x%", "0%", "100%", "-1%", "nan%", "inf%", "1.6",
                          "-5", "12q", "1%%"}) {
    EXPECT_FALSE(UsageError([&] { ParseK({bad}, 8192, false); }).empty()) << bad;
  }
}

TEST(EvalErrorBasis, AddedWhereTheMethodHasIt) {
  const auto specs = WithBasis(
      {"exact", "fathom:bits=28", "fathom:preset=paper,basis=raw", "dense", "random:k=64"}, "klt");
  EXPECT_EQ(specs,
            (std::vector<std::string>{"exact:basis=klt", "fathom:bits=28,basis=klt",
                                      "fathom:preset=paper,basis=raw", "dense", "random:k=64"}));
}

TEST(EvalErrorOptions, BadOnesAreUsageErrors) {
  ExpectHolds(UsageError([] { RunError(""); }), {"capture", "fathom capture"});
  ExpectHolds(UsageError([] { RunError("x --preset nothing"); }), {"nothing", "list", "own-basis"});
  ExpectHolds(UsageError([] { RunError("x --preset ablation-layers"); }), {"--stats-file"});
  ExpectHolds(UsageError([] { RunError("x --preset table --methods exact"); }), {"--preset"});
  ExpectHolds(UsageError([] { RunError("x --methods nosuch"); }), {"nosuch", "valid"});
  ExpectHolds(UsageError([] { RunError("x --methods fathom:bits=0"); }), {"bits=0"});
  for (const char* bad :
       {"--metric other", "--fit never", "--basis auto", "--qk-norm maybe", "--freeze 1.5",
        "--freeze -0.1", "--every 0", "--layers x", "--layers -1", "--threads -1", "--nothing"}) {
    EXPECT_FALSE(UsageError([&] { RunError(std::string("x ") + bad); }).empty()) << bad;
  }
}

TEST(EvalErrorOptions, FilesThatAreNotThere) {
  try {
    RunError("/nonexistent/capture --methods exact --k 64");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    ExpectHolds(error.what(), {"/nonexistent/capture"});
  }
}

TEST(EvalErrorPresets, ListNeedsNoCapture) {
  std::string out;
  EXPECT_EQ(RunError("--preset list", &out), kExitOk);
  for (const EvalPreset& preset : EvalPresets()) ExpectHolds(out, {preset.name + " "});
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'),
            static_cast<std::ptrdiff_t>(EvalPresets().size()));
}

TEST(EvalErrorPresets, SpecsAreValidAndDifferent) {
  std::set<std::string> known;
  for (const MethodInfo& method : ListMethods()) known.insert(method.name);
  std::set<std::string> names;
  std::size_t n_checked = 0;
  for (const EvalPreset& preset : EvalPresets()) {
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_GE(preset.methods.size(), 4U) << preset.name;
    EXPECT_EQ(preset.description.find('\n'), std::string::npos);
    std::set<std::string> specs;
    for (const std::string& text : preset.methods) {
      const MethodSpec spec = MethodSpec::Parse(text);
      EXPECT_TRUE(specs.insert(spec.ToString()).second) << preset.name << ": " << text;
      if (!known.contains(spec.name)) continue;
      EXPECT_NO_THROW(ValidateMethodSpec(spec)) << preset.name << ": " << text;
      ++n_checked;
    }
    EXPECT_FALSE(ParseK(preset.k.empty() ? DefaultK() : preset.k, 131072, true).empty());
  }
  EXPECT_GT(n_checked, 100U);
}

TEST(EvalErrorReport, FourSignificantDigits) {
  EXPECT_EQ(Significant(0.123456), "0.1235");
  EXPECT_EQ(Significant(68), "68.00");
  EXPECT_EQ(Significant(1234.4), "1234");
  EXPECT_EQ(Significant(123456.7), "123457");
  EXPECT_EQ(Significant(0), "0");
  EXPECT_EQ(Significant(1.5e-7), "1.500e-07");
  EXPECT_EQ(Significant(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(Significant(-std::numeric_limits<double>::infinity()), "-inf");
}

TEST(EvalErrorReport, Tables) {
  const std::string text = ErrorTables(MadeRun());
  ExpectHolds(text, {"8,192 tokens", "2 layers", "own prefill, 8,190 tokens", "k = 131 (1.6 %",
                     "k = 492 (6 %", "sparq:r=16", "fathom:bits=28,residual=off"});
  // From .4 at 20 to .1 at 30 bits: .2 is at 25; .9 is above, .05 below.
  std::istringstream lines(text.substr(text.find("equal error")));
  std::string line;
  std::map<std::string, std::string> cells;  // first and last of a line
  while (std::getline(lines, line) && line.find("k = ") == std::string::npos) {
    if (line.find(' ') != std::string::npos)
      cells[line.substr(0, line.find(' '))] = line.substr(line.find_last_of(' ') + 1);
  }
  EXPECT_EQ(cells["sparq:r=16"], "25.00");
  EXPECT_EQ(cells["landmark"], "<20.00");
  EXPECT_EQ(cells["full4"], "-");
  EXPECT_FALSE(cells.contains("exact"));
}

TEST(EvalErrorReport, PointsOfAColumnAreBelowEachOther) {
  std::istringstream lines(ErrorTables(MadeRun()));
  std::string line;
  std::set<std::size_t> places;
  while (std::getline(lines, line) && line.find("equal error") == std::string::npos) {
    if (line.find("0.9876") != std::string::npos) places.insert(line.find("300.2"));
  }
  EXPECT_EQ(places.size(), 1U);
  EXPECT_FALSE(places.contains(std::string::npos));
}

TEST(EvalErrorReport, JsonHasEverything) {
  ErrorRun run = MadeRun();
  run.report.rows[0].mean = std::numeric_limits<double>::quiet_NaN();
  const nlohmann::json json = nlohmann::json::parse(ErrorRunJson(run).dump());
  EXPECT_EQ(json["capture"], run.report.capture);
  EXPECT_EQ(json["geometry"]["n_heads"], 12);
  EXPECT_EQ(json["geometry"]["qk_norm"], true);
  EXPECT_TRUE(json["geometry"]["qkv_bias"].is_null());
  EXPECT_EQ(json["layers"], nlohmann::json({0, 7}));
  EXPECT_EQ(json["built_tokens"], 8190);
  EXPECT_EQ(json["statistics"], "own prefill");
  ASSERT_EQ(json["rows"].size(), 16U);
  EXPECT_TRUE(json["rows"][0]["mean"].is_null());
  const nlohmann::json& row = json["rows"][1];
  EXPECT_EQ(row["method"], "sparq:r=16");
  EXPECT_EQ(row["k"], 131);
  EXPECT_EQ(row["read_bits"], 68);
  EXPECT_EQ(row["mean"], .2);
  EXPECT_EQ(row["mean_se"], .2 / 50);
  EXPECT_EQ(row["layer_mean"], nlohmann::json({.1, .2 * 1.5}));
  for (const char* key : {"spec", "stored_bytes", "rows", "median", "p99", "recall", "recall_se",
                          "mass", "mass_se", "samples"}) {
    EXPECT_TRUE(row.contains(key)) << key;
  }
  ASSERT_EQ(json["equal_error"].size(), 6U);
  EXPECT_NEAR(json["equal_error"][0]["bits"].get<double>(), 25, 1e-9);
  EXPECT_EQ(json["equal_error"][1]["below"], 20);
  EXPECT_TRUE(json["equal_error"][2]["bits"].is_null());
  EXPECT_TRUE(json["equal_error"][2]["below"].is_null());
}

// Checks with Python's parser that the text is well-formed; the texts of its elements, a line each.
std::string TextsOfXml(const std::string& svg) {
  const std::string path = WriteTemporary("figure.svg", svg);
  const std::string script =
      "import sys,xml.etree.ElementTree as t; "
      "print(*[e.text for e in t.parse(sys.argv[1]).iter() if e.text and e.text.strip()],"
      "sep=chr(10))";
  const std::string command = "python3 -c '" + script + "' '" + path + "' >'" + path + ".txt'";
  EXPECT_EQ(std::system(command.c_str()), 0) << svg;
  std::ifstream file(path + ".txt", std::ios::binary);
  std::string texts{std::istreambuf_iterator<char>(file), {}};
  file.close();
  return texts;
}

TEST(EvalErrorPlot, EveryLabelIsThere) {
  ErrorRun short_run = MadeRun();
  short_run.statistics = "file";
  std::erase_if(short_run.report.rows, [](const ErrorRow& row) { return row.k == 131; });
  const PlotFigure figure = ErrorFigure({MadeRun(), short_run});
  ASSERT_EQ(figure.rows.size(), 2U);
  EXPECT_EQ(figure.rows[0].size(), 2U);
  EXPECT_TRUE(figure.rows[1][1].series.empty());  // the second run has one k
  const std::string texts = TextsOfXml(RenderSvg(figure));
  ExpectHolds(texts, {"a <b> & \"c\".safetensors", "statistics: file", "k = 131", "k = 492",
                      "exact\n", "sparq:r=16\n", "landmark\n", "full4\n", "streaming\n", "fathom\n",
                      "fathom:residual=off\n", figure.x_label, figure.y_label, figure.title});
}

TEST(EvalErrorPlot, OddNumbersAndTextsStayWellFormed) {
  ErrorRun run = MadeRun();
  run.report.capture = "\xFF\x01 broken \xE2\x82 \xE2\x82\xAC";
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double values[] = {nan, std::numeric_limits<double>::infinity(), 0, -1};
  for (std::size_t i = 0; i < run.report.rows.size(); ++i) {
    run.report.rows[i].mean = values[i % 4];
    run.report.rows[i].mean_se = nan;
  }
  const std::string svg = RenderSvg(ErrorFigure({run}));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf\""), std::string::npos);
  ExpectHolds(TextsOfXml(svg), {"broken", "\xE2\x82\xAC"});
  ExpectHolds(TextsOfXml(RenderSvg(ErrorFigure({}))), {"Error"});
}

TEST(EvalErrorPlot, LabelsAvoidEachOther) {
  LabelPlacer placer({0, 0, 500, 300});
  std::vector<PixelBox> boxes;
  boxes.reserve(13);
  for (int i = 0; i < 12; ++i) {
    const double x = 240 + 3 * i;
    placer.AddBox({x - 4, 146, x + 4, 154});
  }
  for (int i = 0; i < 12; ++i) boxes.push_back(placer.BesidePoint(240 + 3 * i, 150, 90, 14).box);
  boxes.push_back(placer.OnLevel(150, 60, 14).box);
  for (std::size_t a = 0; a < boxes.size(); ++a) {
    EXPECT_GE(boxes[a].left, 0);
    EXPECT_LE(boxes[a].right, 500);
    for (std::size_t b = 0; b < a; ++b) {
      const bool apart = boxes[a].right <= boxes[b].left || boxes[b].right <= boxes[a].left ||
                         boxes[a].bottom <= boxes[b].top || boxes[b].bottom <= boxes[a].top;
      EXPECT_TRUE(apart) << a << " and " << b;
    }
  }
}

TEST(EvalErrorPlot, TextsAreCutInTheMiddle) {
  EXPECT_EQ(FitText("short", 12, 100), "short");
  const std::string cut = FitText("a-very-long-name-of-a-capture-file.safetensors", 12, 100);
  EXPECT_LE(TextWidth(cut, 12), 100);
  EXPECT_EQ(cut.substr(0, 2), "a-");
  EXPECT_EQ(cut.substr(cut.size() - 3), "ors");
}

// Random keys and queries of two layers, 600 tokens.
void WriteSmallCapture(const std::string& path) {
  CaptureGeometry geometry;
  geometry.n_tokens = 600;
  geometry.heads = {4, 2, 32};
  geometry.layers = {1, 4};
  geometry.q_positions = {596, 597, 598, 599};
  geometry.stats_positions = {100, 200, 300, 400, 500};
  geometry.has_qk_norm = true;
  CaptureWriter writer(path, geometry, CaptureType::kF32);
  test::Random random(7);
  for (const std::int32_t layer : geometry.layers) {
    std::vector<float> q(600 * 4 * 32);
    std::vector<float> k(600 * 2 * 32);
    std::vector<float> v(k.size());
    for (auto* values : {&q, &k, &v})
      std::generate(values->begin(), values->end(),
                    [&] { return static_cast<float>(random.Normal()); });
    writer.Write(layer, 0, 600, q.data(), k.data(), v.data());
  }
  writer.Commit();
}

TEST(EvalErrorRun, TablesJsonAndPictureOfASmallCapture) {
  const test::TempDir dir;
  const std::string folder = dir.string();
  WriteSmallCapture(folder + "/small.safetensors");
  std::string out;
  const int code = RunError(folder +
                                "/small.safetensors --methods exact,fathom:bits=12,residual=off,"
                                "fathom:bits=40,residual=off --k 64,20% --layers 4 -o " +
                                folder + "/report.json --svg " + folder + "/figure.svg -t 1",
                            &out);
  EXPECT_EQ(code, kExitOk);
  ExpectHolds(out, {"600 tokens, 1 layers", "k = 64", "k = 120", "exact", "fathom:bits=12"});
  const nlohmann::json json = nlohmann::json::parse(ReadText(folder + "/report.json"));
  EXPECT_EQ(json["format"], "fathom-error-report");
  EXPECT_EQ(json["options"]["methods"][1], "fathom:bits=12,residual=off");
  ASSERT_EQ(json["runs"].size(), 1U);
  const nlohmann::json& run = json["runs"][0];
  EXPECT_EQ(run["layers"], nlohmann::json({4}));
  ASSERT_EQ(run["rows"].size(), 6U);
  for (const auto& row : run["rows"]) EXPECT_GT(row["mean"].get<double>(), 0) << row;
  // More bits, less error; exact selection, the least.
  const auto mean = [&](std::size_t i) { return run["rows"][i]["mean"].get<double>(); };
  EXPECT_LT(mean(4), mean(2));
  EXPECT_LT(mean(0), mean(4));
  ExpectHolds(TextsOfXml(ReadText(folder + "/figure.svg")),
              {"small.safetensors", "exact\n", "fathom:residual=off\n"});
  // A file that cannot be written is found out before the work.
  try {
    RunError(folder + "/small.safetensors --methods exact --k 64 -o " + folder +
             "/none/report.json");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
  }
}

}  // namespace
}  // namespace fathom::cli
