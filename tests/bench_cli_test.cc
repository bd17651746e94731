// SPDX-License-Identifier: MIT
// `fathom bench` of parts of a step, at tiny sizes: the reports have what they promise, sums agree,
// and bad requests are refused. Nothing here depends on how long anything takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "support/program.h"

namespace fathom {
namespace {

using nlohmann::json;

const std::string kTiny = " --kv-heads 2 --group 2 --head-dim 64 --seconds 0 --layers 2 ";

class BenchCli : public test::ProgramTest {
 protected:
  BenchCli() : ProgramTest("bench ") {}

  json Report(const std::string& arguments) const {
    const test::ProgramResult result = Run(arguments + " --json");
    EXPECT_EQ(result.code, 0) << arguments << "\n" << result.err;
    EXPECT_TRUE(json::accept(result.out)) << result.out;
    return json::parse(result.out, nullptr, false);
  }
};

void ExpectPositive(const json& row, const char* field) {
  ASSERT_TRUE(row.contains(field)) << field << " in " << row.dump();
  EXPECT_GT(row[field].get<double>(), 0) << field << " in " << row.dump();
}

// What all reports share; returns the rows by name and thread count.
std::map<std::pair<std::string, int>, json> CheckReport(const json& report,
                                                        const std::string& bench,
                                                        const std::set<int>& threads) {
  EXPECT_EQ(report["bench"], bench);
  EXPECT_EQ(report["interrupted"], false);
  EXPECT_EQ(report["backend"].get<std::string>().substr(0, 3), "cpu");
  ExpectPositive(report, "cache_bytes");
  ExpectPositive(report, "n_processors");
  std::map<int, json> machine;
  for (const json& speed : report["machine"]) {
    machine[speed["threads"].get<int>()] = speed;
    ExpectPositive(speed, "read_gb_s");
    ExpectPositive(speed, "fma_gflop_s");
  }
  std::map<std::pair<std::string, int>, json> rows;
  for (const json& row : report["rows"]) {
    const int n = row["threads"].get<int>();
    EXPECT_EQ(threads.count(n), 1U) << n;
    EXPECT_EQ(machine.count(n), 1U) << n;
    for (const char* field : {"median_ms", "min_ms", "calls", "layers", "n_tokens", "group"}) {
      ExpectPositive(row, field);
    }
    EXPECT_LE(row["min_ms"].get<double>(), row["median_ms"].get<double>());
    const double seconds = row["median_ms"].get<double>() / 1e3;
    if (row.contains("bytes")) {
      const double gb_s = row["bytes"].get<double>() / seconds / 1e9;
      EXPECT_NEAR(row["gb_s"].get<double>(), gb_s, 1e-6 * gb_s);
      EXPECT_NEAR(row["read_share"].get<double>() * machine[n]["read_gb_s"].get<double>(), gb_s,
                  1e-6 * gb_s);
    }
    if (row.contains("gflop_s")) {
      EXPECT_NEAR(row["fma_share"].get<double>() * machine[n]["fma_gflop_s"].get<double>(),
                  row["gflop_s"].get<double>(), 1e-6 * row["gflop_s"].get<double>());
    }
    EXPECT_TRUE(rows.emplace(std::pair(row["name"].get<std::string>(), n), row).second)
        << row.dump();
  }
  return rows;
}

TEST_F(BenchCli, AttendComparesWithGgml) {
  const json report =
      Report("attend --tokens 2k -k 64 -t 1,2 --methods fathom:bits=28,k=64" + kTiny);
  const auto rows = CheckReport(report, "attend", {1, 2});
  for (const int threads : {1, 2}) {
    for (const char* name :
         {"ggml flash attention", "ggml flash attention, our rows", "ggml soft_max"}) {
      ASSERT_EQ(rows.count({name, threads}), 1U) << name;
      const json& row = rows.at({name, threads});
      EXPECT_LT(row["difference"].get<double>(), 0.02) << name;
      EXPECT_EQ(row["bytes"], 2048 * 2 * 64 * 4) << name;
    }
    const json& dense = rows.at({"dense, all rows", threads});
    ExpectPositive(dense, "ratio");
    ExpectPositive(dense, "flash_ratio");
    EXPECT_EQ(dense["rows_per_head"], 2048);
    const json& listed = rows.at({"listed rows, k=64", threads});
    EXPECT_GE(listed["rows_per_head"].get<double>(), 64);
    EXPECT_LE(listed["rows_per_head"].get<double>(), 36 + 2 * (64 - 36));
    const json& method = rows.at({"fathom:bits=28,k=64", threads});
    ExpectPositive(method, "index_bytes");
    ExpectPositive(method, "read_bits");
    EXPECT_EQ(method["layers"], 2);
  }
  EXPECT_EQ(rows.size(), 12U);
}

TEST_F(BenchCli, AttendWithoutRivalsOrMethods) {
  // 64 tokens: everything is attended, and the ratio is to our own dense attention.
  const json report = Report("attend --tokens 64 -t 1 --methods none --no-ggml" + kTiny);
  const auto rows = CheckReport(report, "attend", {1});
  EXPECT_EQ(rows.size(), 2U);
  EXPECT_DOUBLE_EQ(rows.at({"dense, all rows", 1})["ratio"].get<double>(), 1);
  EXPECT_EQ(rows.at({"listed rows, k=512", 1})["rows_per_head"], 64);
}

TEST_F(BenchCli, PrefillComparesWithGgml) {
  const json report = Report("prefill --tokens 128,256 --chunk 37 -t 2" + kTiny);
  EXPECT_EQ(report["rows"].size(), 8U);
  for (const json& row : report["rows"]) {
    const double n = row["n_tokens"].get<double>();
    ExpectPositive(row, "tokens_s");
    ExpectPositive(row, "ratio");
    const double operations = 4.0 * (37 * n + 37 * 38 / 2) * 4 * 64;
    const double gflop_s = operations / (row["median_ms"].get<double>() / 1e3) / 1e9;
    EXPECT_NEAR(row["gflop_s"].get<double>(), gflop_s, 1e-6 * gflop_s);
    EXPECT_EQ(row.contains("difference"), row["name"] != "ours");
  }
}

TEST_F(BenchCli, ScanComparesWithWholeKeysAndRivals) {
  const json report = Report("scan --tokens 64,4k --bits 8,28 --budget 48 -t 1,2" + kTiny);
  std::map<std::string, double> read_bits;
  // Masked adds are compared with where the machine has that set.
  const bool masked = report["rows"].dump().find("masked adds") != std::string::npos;
  EXPECT_EQ(report["rows"].size(), 2U * 2U * (masked ? 25U : 19U));
  for (const json& row : report["rows"]) {
    ExpectPositive(row, "ratio");
    ExpectPositive(row, "mkeys_s");
    const double bits = row["read_bits"].get<double>();
    EXPECT_NEAR(row["bytes"].get<double>(), row["n_tokens"].get<double>() * 2 * bits / 8, 1e-6);
    read_bits[row["name"].get<std::string>()] = bits;
    // A block of its own fits its steps on itself: the scores of 64 tokens say little.
    if (row.contains("correlation") && row["n_tokens"] == 4096) {
      const bool ours = row["name"] == "fathom, bits=28";
      EXPECT_GT(row["correlation"].get<double>(), ours ? 0.7 : 0.4) << row.dump();
    }
  }
  EXPECT_EQ(read_bits.at("exact scores"), 16 * 64);
  EXPECT_EQ(read_bits.at("landmark, a mean key of 8 tokens"), 2 * 64);
  EXPECT_EQ(read_bits.at("nibbles, 32 channels"), 136);
  EXPECT_EQ(read_bits.at("nibbles, 16 channels"), 68);
  EXPECT_EQ(read_bits.at("nibbles, 32 of 64 channels"), 136);
  EXPECT_EQ(read_bits.at("thumbnail, 2 planes"), 64 * 2.25);
  EXPECT_EQ(read_bits.at("fathom, bits=28, best 512"), read_bits.at("fathom, bits=28"));
  EXPECT_LE(read_bits.at("fathom, bits=8"), 8);
  EXPECT_GT(read_bits.at("fathom, bits=8"), 4);
  EXPECT_LE(read_bits.at("fathom, bits=28"), 28);
  EXPECT_GT(read_bits.at("fathom, bits=28"), 24);
  // 48 code bits at most, and a quarter of a bit for the scale of every channel that is read.
  EXPECT_LE(read_bits.at("preset=paper, budget=48"), 48 + 64 * 0.25);
  EXPECT_GT(read_bits.at("preset=paper, budget=48"), 36);
}

TEST_F(BenchCli, SelectComparesWithNthElement) {
  for (const std::string tokens : {"64", "1k"}) {
    const json report = Report("select -k 100 -t 1,2 --tokens " + tokens + kTiny);
    const auto rows = CheckReport(report, "select", {1, 2});
    EXPECT_EQ(rows.size(), 6U);
    const double n = tokens == "64" ? 64 : 1024;
    for (const auto& [key, row] : rows) {
      EXPECT_EQ(row["bytes"], (n - 36) * 4 * 4) << key.first;
      EXPECT_GE(row["rows_per_head"].get<double>(), std::min(n, 100.0)) << key.first;
      EXPECT_LE(row["rows_per_head"].get<double>(), std::min(n, 36.0 + 2 * 64)) << key.first;
      ExpectPositive(row, "ratio");
    }
  }
}

TEST_F(BenchCli, TablesForEyes) {
  const test::ProgramResult result = Run("attend --tokens 1k -t 1 --methods none" + kTiny);
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* part : {"of read bw", "ratio", "ggml soft_max", "1,024", "memory reads"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part << "\n" << result.out;
  }
}

TEST_F(BenchCli, BadRequestsAreRefused) {
  for (const std::string bench : {"scan", "select", "attend", "prefill"}) {
    ExpectError(bench + " --tokens 100", 2, {"--tokens 100", "multiple of 64"});
    ExpectError(bench + " --tokens 3z", 2, {"3z", "32k"});
    ExpectError(bench + " --tokens 1024M", 2, {"1024M"});
    ExpectError(bench + " --head-dim 72", 2, {"--head-dim 72", "16"});
    ExpectError(bench + " --head-dim 512", 2, {"--head-dim", "256"});
    ExpectError(bench + " --group 17", 2, {"--group", "16"});
    ExpectError(bench + " --kv-heads 0", 2, {"--kv-heads"});
    ExpectError(bench + " --threads 0", 2, {"--threads", "'0'", "all"});
    ExpectError(bench + " --threads many", 2, {"'many'", "all"});
    ExpectError(bench + " --backend gpu", 2, {"gpu", "cpu/avx2"});
    ExpectError(bench + " --layers -1", 2, {"--layers"});
    ExpectError(bench + " --speed", 2, {"--speed"});
  }
  ExpectError("attend -k 36", 2, {"-k", "37"});
  ExpectError("select -k 36", 2, {"-k", "37"});
  ExpectError("scan -k 36", 2, {"-k", "37"});
  ExpectError("attend --methods fathm", 2, {"fathm", "fathom"});
  ExpectError("scan --bits 0", 2, {"--bits", "1 to 1024"});
  ExpectError("scan --budget 2000", 2, {"--budget", "1 to 1024"});
  ExpectError("prefill --chunk 0", 2, {"--chunk"});
}

TEST_F(BenchCli, ShapesBeyondTheMemoryAreRefused) {
  for (const std::string bench : {"scan", "select", "attend", "prefill"}) {
    const test::ProgramResult result = Run(bench + " --tokens 16M --kv-heads 256 -t 1");
    EXPECT_EQ(result.code, 1) << bench;
    EXPECT_EQ(result.out, "") << bench;
    EXPECT_NE(result.err.find("choose fewer --tokens"), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace fathom
