// SPDX-License-Identifier: MIT
// `fathom bench step` without a device: help, options, the error; and what is written of a report
// made by hand.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../apps/cli/bench_step_report.h"
#include "../apps/cli/svg_bars.h"
#include "fathom/fathom.h"
#include "support/program.h"
#include "support/random_data.h"

namespace fathom::cli {
namespace {

class BenchStepCli : public test::ProgramTest {
 protected:
  BenchStepCli() : ProgramTest("bench step ") {}

  // Checks with Python's parser that the text is well-formed; the texts of its elements, a line
  // each.
  std::string TextsOfXml(const std::string& svg) const {
    const std::string path = Write("figure.svg", svg);
    const std::string script =
        "import sys,xml.etree.ElementTree as t; "
        "print(*[e.text for e in t.parse(sys.argv[1]).iter() if e.text and e.text.strip()],"
        "sep=chr(10))";
    const std::string command = "python3 -c '" + script + "' '" + path + "' >'" + path + ".txt'";
    EXPECT_EQ(std::system(command.c_str()), 0) << svg;
    return test::ReadAll(path + ".txt");
  }
};

bool HasDevice() {
  for (const BackendInfo& backend : ListBackends()) {
    if (backend.name == "cuda" && backend.available) return true;
  }
  return false;
}

void ExpectHolds(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in\n" << text;
  }
}

StepRow MadeRow(const std::string& method, double gather_ms, std::int64_t n_tokens,
                const std::string& placement = "host") {
  StepRow row;
  row.n_tokens = n_tokens;
  row.batch = 1;
  row.placement = placement;
  row.method = method;
  StepBenchResult& result = row.result.emplace();
  result.method = method;
  result.device = "NVIDIA H200";
  result.placement = placement;
  result.n_tokens = n_tokens;
  result.batch = 1;
  result.steps = 30;
  result.stages = {{"dense", 5},   {"plan", .5}, {"gather", gather_ms}, {"scan", 2},
                   {"select", .5}, {"rows", 1},  {"attend", .5},        {"other", .5}};
  result.gpu_ms = 10 + gather_ms;
  result.wall_ms = 1.02 * result.gpu_ms;
  result.link_bytes = 50e6 * (gather_ms + 1);
  result.hbm_bytes = 16e9;
  result.scan_bytes = 6e9;
  result.gather_gb_s = 50;
  result.rows_gb_s = 40;
  result.memcpy_gb_s = 55;
  result.hbm_copy_gb_s = 4270;
  result.non_transfer_share = 9 / result.gpu_ms;
  result.read_bits = 28;
  result.winners_per_head = 1234;
  result.pinned = true;
  return row;
}

StepReport MadeReport() {
  constexpr std::int64_t kMillion = std::int64_t{1} << 20;
  StepReport report;
  report.shape = KnownStepShapes().front();
  report.k = 512;
  report.rows = {MadeRow("fathom:bits=28", 20, kMillion),
                 MadeRow("fathom:budget=48,preset=paper", 40, kMillion),
                 MadeRow("sparq:r=32", 80, kMillion), MadeRow("fathom:bits=28", 5, 4096, "hbm")};
  StepRow refused;
  refused.n_tokens = 4096;
  refused.batch = 1;
  refused.placement = "hbm";
  refused.method = "dense";
  refused.refusal = "1.0 TiB of HBM are needed";
  report.rows.push_back(refused);
  return report;
}

TEST_F(BenchStepCli, HelpNamesWhatThereIs) {
  const test::ProgramResult help = Run("--help");
  EXPECT_EQ(help.code, 0);
  ExpectHolds(help.out,
              {"--shape", "qwen3-8b", "llama-3.1-8b", "smoke", "--ctx", "--methods", "--placement",
               "--batch", "--rows-fold", "--keys", "--steps", "--svg", "--json"});
}

TEST_F(BenchStepCli, BadRequestsAreRefused) {
  ExpectError("--shape gpt", 2, {"--shape", "gpt", "qwen3-8b"});
  ExpectError("--ctx 3z", 2, {"3z", "32k"});
  ExpectError("--ctx 0", 2, {"'0'"});
  ExpectError("--methods fathm", 2, {"fathm", "fathom"});
  ExpectError("--methods dense fathom:bits=28,k=512", 2, {"fathom:bits=28,k=512", "--k"});
  ExpectError("--methods sparq:r=0", 2, {"sparq"});
  ExpectError("--placement disk", 2, {"--placement", "disk", "hbm"});
  ExpectError("--batch 0", 2, {"--batch"});
  ExpectError("--k 36", 2, {"-k", "37"});
  ExpectError("--steps 2", 2, {"--steps"});
  ExpectError("--rows-fold some", 2, {"some"});
  ExpectError("--speed", 2, {"--speed"});
}

// Before anything else is done, so on every machine with a build of CUDA.
TEST_F(BenchStepCli, CapturesThatDoNotFitAreRefused) {
  const std::string capture =
      std::string(FATHOM_SOURCE_DIR) + "/tests/data/capture-960.safetensors";
  ExpectError("--shape smoke --keys " + test::Quoted(capture), 2,
              {"capture-960.safetensors", "128 channels", "smoke of 64", "--shape"});
  ExpectError("--keys " + test::Quoted(folder_ / "none.safetensors"), 1, {"none.safetensors"});
  ExpectError("--keys " + test::Quoted(Write("text.safetensors", "no capture")), 1,
              {"text.safetensors"});
  if (HasDevice()) return;
  ExpectError("--shape qwen3-8b --keys " + test::Quoted(capture), 1, {"CUDA"});
}

TEST_F(BenchStepCli, WithoutADeviceIsOneClearError) {
  if (HasDevice()) GTEST_SKIP() << "there is a device";
  ExpectError("--shape smoke --ctx 4k", 1, {"CUDA"});
  ExpectError("--shape smoke --ctx 4k --json --svg " + test::Quoted(folder_ / "a.svg"), 1,
              {"CUDA"});
}

TEST_F(BenchStepCli, TheSmallShapeRuns) {
  if (!HasDevice()) GTEST_SKIP() << "no CUDA device";
  const test::ProgramResult result =
      Run("--shape smoke --ctx 16k --steps 3 --placement host,hbm --methods fathom:bits=28 "
          "sparq:r=32 dense --json");
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["rows"].size(), 6U);
  for (const nlohmann::json& row : json["rows"]) {
    ASSERT_FALSE(row.contains("refusal")) << row.dump();
    EXPECT_GT(row["gpu_ms"].get<double>(), 0) << row.dump();
    EXPECT_GE(row["wall_ms"].get<double>(), row["gpu_ms"].get<double>() * .5) << row.dump();
    EXPECT_GT(row["memcpy_gb_s"].get<double>(), 0) << row.dump();
    EXPECT_GT(row["ratio"].get<double>(), 0) << row.dump();
  }
}

TEST_F(BenchStepCli, TheSmallShapeRunsOnCapturedKeys) {
  if (!HasDevice()) GTEST_SKIP() << "no CUDA device";
  CaptureGeometry g;
  g.n_tokens = 1000;
  g.heads = {4, 2, 64};
  g.layers = {3};
  g.q_positions = {998, 999};
  g.stats_positions = {100, 900};
  const std::string path = (folder_ / "made.safetensors").string();
  CaptureWriter writer(path, g, CaptureType::kF32);
  const auto wide = test::RandomNormal(1000 * 256, 1), k = test::RandomNormal(1000 * 128, 2);
  writer.Write(3, 0, 1000, wide.data(), k.data(), k.data());
  writer.Commit();
  const std::string keys = " --keys " + test::Quoted(path);
  const test::ProgramResult result =
      Run("--shape smoke --ctx 16k --batch 1,2 --steps 3 --placement host,hbm --methods "
          "fathom:bits=28 fathom:preset=paper sparq:r=32 double-sparsity loki landmark exact dense "
          "--json" +
          keys);
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["keys"]["n_tokens"], 960);
  ASSERT_EQ(json["rows"].size(), 32U);
  for (const nlohmann::json& row : json["rows"]) {
    ASSERT_FALSE(row.contains("refusal")) << row.dump();
    EXPECT_GT(row["gpu_ms"].get<double>(), 0) << row.dump();
    EXPECT_EQ(row["random_index"], false) << row.dump();
  }
  ExpectError("--shape smoke --ctx 16k --methods dense --rows-fold 1024" + keys, 2,
              {"1024", "960", "multiple"});
}

TEST(BenchStepReport, ShapesAreValid) {
  for (const StepShape& shape : KnownStepShapes()) {
    EXPECT_EQ(shape.heads.n_heads % shape.heads.n_kv_heads, 0) << shape.name;
    EXPECT_LE(shape.heads.group(), kMaxGroup) << shape.name;
    EXPECT_GT(shape.n_layers * shape.n_embd * shape.n_ff, 0) << shape.name;
  }
}

TEST(BenchStepReport, RatiosAreWithinOneSetting) {
  const StepReport report = MadeReport();
  EXPECT_DOUBLE_EQ(StepRatio(report, report.rows[0]), 3);
  EXPECT_DOUBLE_EQ(StepRatio(report, report.rows[1]), 1.8);
  EXPECT_DOUBLE_EQ(StepRatio(report, report.rows[2]), 1);
  EXPECT_EQ(StepRatio(report, report.rows[3]), 0);  // no baseline at 4,096 tokens
  EXPECT_EQ(StepRatio(report, report.rows[4]), 0);
}

TEST(BenchStepReport, JsonHasAllThatTheToolsRead) {
  const nlohmann::json json = StepJson(MadeReport());
  EXPECT_EQ(json["bench"], "step");
  EXPECT_EQ(json["k"], 512);
  EXPECT_EQ(json["shape"]["n_layers"], 36);
  EXPECT_EQ(json["interrupted"], false);
  ASSERT_EQ(json["rows"].size(), 5U);
  const nlohmann::json& row = json["rows"][1];
  EXPECT_EQ(row["n_tokens"], 1 << 20);
  EXPECT_EQ(row["stages"]["gather"], 40);
  EXPECT_EQ(row["stages"].size(), 8U);
  EXPECT_NEAR(row["wall_ratio"].get<double>(), 1.02, 1e-12);
  EXPECT_NEAR(row["tokens_per_second"].get<double>(), 1000 / 51.0, 1e-9);
  EXPECT_NEAR(row["link_gb_s"].get<double>(), 50, 1e-9);
  EXPECT_NEAR(row["link_share"].get<double>(), 50 / 55.0, 1e-12);
  EXPECT_NEAR(row["scan_gb_s"].get<double>(), 3000, 1e-9);
  EXPECT_EQ(row["published"]["gpu_ms"], 177);  // whatever the order of the spec's options
  EXPECT_FALSE(json["rows"][0].contains("published"));
  EXPECT_FALSE(json["rows"][3].contains("ratio"));
  EXPECT_EQ(json["rows"][4]["refusal"], "1.0 TiB of HBM are needed");
  EXPECT_FALSE(json["rows"][4].contains("gpu_ms"));
}

TEST(BenchStepReport, TablesHoldRowsPublishedNumbersAndNotes) {
  StepReport report = MadeReport();
  std::string text = StepTables(report);
  ExpectHolds(text, {"fathom:bits=28", "1,048,576", "wall/GPU", "1.020", "3.00x", "gather",
                     "link GB/s", "91 %", "NVIDIA H200", "pinned memcpy 55.0 GB/s", "177 (225)",
                     "296 (310)", "1.67x", "qwen3-8b (36 layers",
                     "not measured: dense, 4,096 tokens, batch 1, index in HBM: 1.0 TiB"});
  EXPECT_EQ(text.find("rows folded"), std::string::npos);
  EXPECT_EQ(text.find("not pinned"), std::string::npos);
  for (StepRow& row : report.rows) {
    if (!row.result) continue;
    row.result->row_modulus = 262144;
    row.result->pinned = false;
    row.result->redone_lists = 3;
  }
  text = StepTables(report);
  ExpectHolds(text, {"rows folded: 1,048,576 tokens, batch 1, index in host memory: token i uses "
                     "row i mod 262,144\n",
                     "not pinned: sparq:r=32", "made again: 3 in 30 steps: sparq:r=32"});
  report.shape.name = "smoke";
  EXPECT_EQ(StepTables(report).find("paper's"), std::string::npos);
  for (StepRow& row : report.rows) row.result.reset();
  ExpectHolds(StepTables(report), {"fathom:bits=28", "not measured: dense"});
  EXPECT_NE(StepTables({}).find("method"), std::string::npos);
}

StepReport CapturedReport() {
  StepReport report = MadeReport();
  report.keys = {"book.safetensors", "Qwen3 8B", 131072};
  report.rows[2].result->random_index = true;
  return report;
}

TEST_F(BenchStepCli, WhichKeysIsSaidEverywhere) {
  const StepReport made = MadeReport(), captured = CapturedReport();
  EXPECT_NE(StepTables(made).find("synthetic keys\n"), std::string::npos);
  EXPECT_EQ(StepTables(made).find("random codes"), std::string::npos);
  EXPECT_TRUE(StepJson(made)["keys"].is_null());
  EXPECT_EQ(StepFigure(made).title.find("keys"), std::string::npos);

  const std::string text = StepTables(captured);
  ExpectHolds(text, {"keys of book.safetensors (Qwen3 8B): token i uses captured token i mod "
                     "131,072\n",
                     "random codes in the index", "of the keys: sparq:r=32\n"});
  EXPECT_EQ(text.find("synthetic"), std::string::npos);
  const nlohmann::json json = StepJson(captured);
  EXPECT_EQ(json["keys"]["file"], "book.safetensors");
  EXPECT_EQ(json["keys"]["model"], "Qwen3 8B");
  EXPECT_EQ(json["keys"]["n_tokens"], 131072);
  EXPECT_EQ(json["rows"][2]["random_index"], true);
  EXPECT_EQ(json["rows"][0]["random_index"], false);
  ExpectHolds(TextsOfXml(RenderBars(StepFigure(captured))),
              {"keys of book.safetensors (Qwen3 8B)"});
}

TEST_F(BenchStepCli, PicturesHoldEveryBar) {
  const BarFigure figure = StepFigure(MadeReport());
  ASSERT_EQ(figure.panels.size(), 2U);
  EXPECT_EQ(figure.panels[0].bars.size(), 3U);
  const std::string texts = TextsOfXml(RenderBars(figure));
  ExpectHolds(texts, {"qwen3-8b", "NVIDIA H200", "dense\n", "select\n", "other\n",
                      "1,048,576 tokens, batch 1, index in host memory\n", "sparq:r=32\n",
                      "30.0, 3.00x\n", "90.0, 1.00x\n", "not measured\n", "GPU ms per step\n"});
}

TEST_F(BenchStepCli, OddNumbersAndTextsStayWellFormed) {
  const double infinity = std::numeric_limits<double>::infinity();
  BarFigure figure;
  figure.title = "\xFF\x01 broken \xE2\x82 <b> & \"c\"";
  figure.parts = {"a", "b & c"};
  figure.panels = {
      {"nothing", {}},
      {"odd", {{"<x>", {std::numeric_limits<double>::quiet_NaN(), infinity, -1, 0}, ""}}},
      {"far", {{"one", {1, 2}, ""}, {"two", {2, 2}, ""}, {"long", {500, 1500}, "10x"}}},
      {"small", {{"tiny", {1e-7, 2e-7}, ""}}},
      {"many parts", {{"ten", std::vector<double>(10, 1), ""}}}};
  const std::string svg = RenderBars(figure);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  ExpectHolds(TextsOfXml(svg), {"broken", "<x>", "b & c", "nothing", "\xE2\x86\x92 2,000, 10x"});
  ExpectHolds(TextsOfXml(RenderBars({})), {});
}

// The tool's text of a report is what it says, and --check finds a difference.
TEST_F(BenchStepCli, TheReportToolFillsItsPage) {
  const std::string result = Write("made.json", StepJson(MadeReport()).dump(2));
  const std::string page = Write("page.md", "before\n<!-- made -->\n<!-- /made -->\nafter\n");
  const std::string tool = "python3 " +
                           test::Quoted(std::string(FATHOM_SOURCE_DIR) + "/tools/step_report.py") +
                           " --doc " + test::Quoted(page) + " " + test::Quoted(result);
  EXPECT_NE(std::system((tool + " --check 2>/dev/null").c_str()), 0);
  ASSERT_EQ(std::system(tool.c_str()), 0);
  const std::string text = test::ReadAll(page);
  ExpectHolds(text, {"before\n<!-- made -->\n", "<!-- /made -->\nafter\n", "| `fathom:bits=28` |",
                     "1,048,576 tokens, batch 1, index in host memory", "177 (225)", "3.00",
                     "`dense` was not measured: 1.0 TiB of HBM", "pinned memcpy 55.0 GB/s"});
  EXPECT_EQ(std::system((tool + " --check").c_str()), 0);
  EXPECT_EQ(text.find("captured"), std::string::npos);
  Write("made.json", StepJson(CapturedReport()).dump(2));
  ASSERT_EQ(std::system(tool.c_str()), 0);
  ExpectHolds(test::ReadAll(page),
              {"those of `book.safetensors` (Qwen3 8B): token i uses captured token i mod 131,072.",
               "The index of `sparq:r=32` holds random codes."});
}

}  // namespace
}  // namespace fathom::cli
