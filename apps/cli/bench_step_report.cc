// SPDX-License-Identifier: MIT
#include "bench_step_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>

#include "common.h"
#include "table.h"

namespace fathom::cli {
namespace {

constexpr double kGb = 1e9;

// The paper's step at 1M tokens: Qwen3-8B, k = 512, one sequence, index and rows in host memory,
// A100 on PCIe 4.
struct Published {
  const char* name;
  const char* method;  // its spec here
  double gpu_ms;
  double wall_ms;
};
constexpr std::array kPublished = {
    Published{"Fathom 40", "fathom:preset=paper,budget=40", 168, 224},
    Published{"Fathom 48", "fathom:preset=paper,budget=48", 177, 225},
    Published{"Fathom 64", "fathom:preset=paper,budget=64", 215, 230},
    Published{"SparQ, 16 channels", "sparq:r=16", 186, 210},
    Published{"32 channels", kStepBaseline, 296, 310},
    Published{"landmark", "landmark", 444, 466},
    Published{"thumbnail", "thumbnail", 554, 583}};
constexpr std::int64_t kPublishedTokens = std::int64_t{1} << 20;
constexpr double kPublishedBaseline = 296;

std::string Canonical(const std::string& spec) { return MethodSpec::Parse(spec).ToString(); }

bool InPublishedSetting(const StepReport& report, const StepRow& row) {
  return report.shape.name == "qwen3-8b" && report.k == 512 && row.n_tokens == kPublishedTokens &&
         row.batch == 1 && row.placement == "host";
}

const Published* PublishedOf(const StepReport& report, const StepRow& row) {
  if (!InPublishedSetting(report, row)) return nullptr;
  for (const Published& one : kPublished) {
    if (Canonical(one.method) == Canonical(row.method)) return &one;
  }
  return nullptr;
}

double StageMs(const StepBenchResult& result, std::string_view name) {
  for (const StepStage& stage : result.stages) {
    if (stage.name == name) return stage.gpu_ms;
  }
  return 0;
}

// 0 where there is nothing to divide by.
double Share(double part, double whole) { return whole > 0 ? part / whole : 0; }

// What follows from a result.
struct Rates {
  double wall_ratio = 0;
  double tokens_s = 0;
  double link_gb_s = 0;  // over the stages that transfer
  double hbm_gb_s = 0;   // over the whole step
  double scan_gb_s = 0;  // over the scan
};

Rates RatesOf(const StepBenchResult& result) {
  Rates rates;
  rates.wall_ratio = Share(result.wall_ms, result.gpu_ms);
  rates.tokens_s = Share(1e3 * result.batch, result.wall_ms);
  const double transfer_ms = StageMs(result, "gather") + StageMs(result, "rows");
  rates.link_gb_s = Share(result.link_bytes / kGb, transfer_ms / 1e3);
  rates.hbm_gb_s = Share(result.hbm_bytes / kGb, result.gpu_ms / 1e3);
  rates.scan_gb_s = Share(result.scan_bytes / kGb, StageMs(result, "scan") / 1e3);
  return rates;
}

std::string Ms(double ms) { return Fixed(ms, ms < 10 ? 3 : ms < 100 ? 2 : 1); }
// "-" for what a method does not have.
std::string OrDash(double value, int decimals) { return value > 0 ? Fixed(value, decimals) : "-"; }
std::string Percent(double share) { return share > 0 ? Fixed(share * 100, 0) + " %" : "-"; }
std::string Times(double ratio) { return ratio > 0 ? Fixed(ratio, 2) + "x" : "-"; }

std::vector<std::string> Setting(const StepRow& row) {
  return {row.method, Grouped(row.n_tokens), std::to_string(row.batch), row.placement};
}

std::string SettingText(const StepRow& row) {
  return Grouped(row.n_tokens) + " tokens, batch " + std::to_string(row.batch) + ", index in " +
         (row.placement == "hbm" ? "HBM" : "host memory");
}

bool SameSetting(const StepRow& a, const StepRow& b) {
  return std::tie(a.n_tokens, a.batch, a.placement) == std::tie(b.n_tokens, b.batch, b.placement);
}

std::string TimesTable(const StepReport& report) {
  std::vector<std::string> header = {"method",  "context",  "batch",    "index",        "GPU ms",
                                     "wall ms", "wall/GPU", "tokens/s", "vs 32-channel"};
  for (const std::string_view stage : kStepStages) header.emplace_back(stage);
  const std::size_t n_columns = header.size();
  Table table(std::move(header));
  for (const StepRow& row : report.rows) {
    std::vector<std::string> cells = Setting(row);
    if (row.result) {
      const Rates rates = RatesOf(*row.result);
      cells.insert(cells.end(),
                   {Ms(row.result->gpu_ms), Ms(row.result->wall_ms), Fixed(rates.wall_ratio, 3),
                    Fixed(rates.tokens_s, 1), Times(StepRatio(report, row))});
      for (const std::string_view stage : kStepStages) {
        cells.push_back(OrDash(StageMs(*row.result, stage), 2));
      }
    }
    cells.resize(n_columns, "-");
    table.Add(std::move(cells));
  }
  return table.ToString();
}

std::string BytesTable(const StepReport& report) {
  Table table({"method", "context", "batch", "index", "read bits", "rows/head", "link GB",
               "link GB/s", "of memcpy", "gather GB/s", "of memcpy", "rows GB/s", "HBM GB",
               "HBM GB/s", "of copy", "scan GB/s", "of copy", "not transfer"});
  for (const StepRow& row : report.rows) {
    if (!row.result) continue;
    const StepBenchResult& result = *row.result;
    const Rates rates = RatesOf(result);
    std::vector<std::string> cells = Setting(row);
    cells.insert(
        cells.end(),
        {OrDash(result.read_bits, 1), OrDash(result.winners_per_head, 0),
         OrDash(result.link_bytes / kGb, 3), OrDash(rates.link_gb_s, 1),
         Percent(Share(rates.link_gb_s, result.memcpy_gb_s)), OrDash(result.gather_gb_s, 1),
         Percent(Share(result.gather_gb_s, result.memcpy_gb_s)), OrDash(result.rows_gb_s, 1),
         OrDash(result.hbm_bytes / kGb, 2), OrDash(rates.hbm_gb_s, 0),
         Percent(Share(rates.hbm_gb_s, result.hbm_copy_gb_s)), OrDash(rates.scan_gb_s, 0),
         Percent(Share(rates.scan_gb_s, result.hbm_copy_gb_s)),
         Percent(result.non_transfer_share)});
    table.Add(std::move(cells));
  }
  return table.ToString();
}

// Empty where nothing was measured in the published setting.
std::string PublishedTable(const StepReport& report) {
  Table table({"beside the paper", "its GPU ms (wall)", "vs 32-channel", "here GPU ms (wall)",
               "vs 32-channel", "faster"});
  bool any = false;
  for (const StepRow& row : report.rows) {
    if (!row.result || !InPublishedSetting(report, row)) continue;
    any = true;
    const auto both = [](double gpu_ms, double wall_ms) {
      return Fixed(gpu_ms, gpu_ms < 100 ? 1 : 0) + " (" + Fixed(wall_ms, wall_ms < 100 ? 1 : 0) +
             ")";
    };
    const std::string here = both(row.result->gpu_ms, row.result->wall_ms);
    const std::string ratio = Times(StepRatio(report, row));
    if (const Published* one = PublishedOf(report, row)) {
      table.Add({std::string(one->name) + " (" + row.method + ")", both(one->gpu_ms, one->wall_ms),
                 Times(kPublishedBaseline / one->gpu_ms), here, ratio,
                 Times(Share(one->gpu_ms, row.result->gpu_ms))});
    } else {
      table.Add({row.method, "-", "-", here, ratio, "-"});
    }
  }
  if (!any) return {};
  return "\n" + table.ToString() +
         "the paper's: A100, PCIe 4; faster: its GPU time over the one here\n";
}

// What the machine did in the run: "pinned memcpy 55.1 GB/s", or "54.9 .. 55.1" over all results.
std::string RangeText(const StepReport& report, double StepBenchResult::*rate) {
  double low = 0;
  double high = 0;
  for (const StepRow& row : report.rows) {
    if (!row.result || !(*row.result.*rate > 0)) continue;
    low = low > 0 ? std::min(low, *row.result.*rate) : *row.result.*rate;
    high = std::max(high, *row.result.*rate);
  }
  const int decimals = high < 100 ? 1 : 0;
  const std::string first = Fixed(low, decimals);
  const std::string last = Fixed(high, decimals);
  return (first == last ? first : first + " to " + last) + " GB/s";
}

const StepBenchResult* FirstResult(const StepReport& report) {
  for (const StepRow& row : report.rows) {
    if (row.result) return &*row.result;
  }
  return nullptr;
}

std::string ShapeText(const StepReport& report) {
  const StepShape& shape = report.shape;
  return shape.name + " (" + std::to_string(shape.n_layers) + " layers, " +
         std::to_string(shape.heads.n_heads) + " heads, " + std::to_string(shape.heads.n_kv_heads) +
         " KV heads of " + std::to_string(shape.heads.head_dim) +
         " channels), random weights, k = " + Grouped(report.k);
}

// "keys of a.safetensors (Qwen3-8B)", or "synthetic keys".
std::string KeysText(const StepKeys& keys) {
  if (keys.file.empty()) return "synthetic keys";
  return "keys of " + keys.file + (keys.model.empty() ? "" : " (" + keys.model + ")");
}

// Methods whose index holds random codes, each once.
std::string RandomText(const StepReport& report) {
  std::vector<std::string> methods;
  for (const StepRow& row : report.rows) {
    if (!row.result || !row.result->random_index) continue;
    if (std::ranges::find(methods, row.method) == methods.end()) methods.push_back(row.method);
  }
  std::string text;
  for (const std::string& method : methods) text += (text.empty() ? "" : ", ") + method;
  if (text.empty()) return text;
  return "random codes in the index, so that winners are not those of the keys: " + text + "\n";
}

std::string Notes(const StepReport& report) {
  std::string text;
  if (const StepBenchResult* first = FirstResult(report)) {
    text += ShapeText(report) + ", " + first->device + "; medians per step, stages by events\n";
    text += KeysText(report.keys);
    if (report.keys.n_tokens > 0) {
      text += ": token i uses captured token i mod " + Grouped(report.keys.n_tokens);
    }
    text += "\n" + RandomText(report);
    text += "in this run: pinned memcpy " + RangeText(report, &StepBenchResult::memcpy_gb_s) +
            ", copy in HBM " + RangeText(report, &StepBenchResult::hbm_copy_gb_s) +
            "; link GB/s over the stages gather and rows, HBM GB/s over the step\n";
  }
  const StepRow* before = nullptr;
  for (const StepRow& row : report.rows) {
    if (!row.result || row.result->row_modulus == 0) continue;
    const bool known = before != nullptr && SameSetting(*before, row) &&
                       before->result->row_modulus == row.result->row_modulus;
    before = &row;
    if (known) continue;
    text += "rows folded: " + SettingText(row) + ": token i uses row i mod " +
            Grouped(row.result->row_modulus) + "\n";
  }
  for (const StepRow& row : report.rows) {
    const std::string what = row.method + ", " + SettingText(row);
    if (!row.result) {
      text += "not measured: " + what + ": " + row.refusal + "\n";
      continue;
    }
    if (!row.result->pinned) text += "host memory was not pinned: " + what + "\n";
    if (row.result->redone_lists > 0) {
      text += "lists of candidates made again: " + Grouped(row.result->redone_lists) + " in " +
              Grouped(row.result->steps) + " steps: " + what + "\n";
    }
  }
  return text;
}

// Null: synthetic.
nlohmann::json KeysJson(const StepKeys& keys) {
  if (keys.file.empty()) return nullptr;
  return {{"file", keys.file}, {"model", keys.model}, {"n_tokens", keys.n_tokens}};
}

nlohmann::json ResultJson(const StepReport& report, const StepRow& row) {
  const StepBenchResult& result = *row.result;
  const Rates rates = RatesOf(result);
  nlohmann::json json = {{"spec", result.method},
                         {"device", result.device},
                         {"steps", result.steps},
                         {"gpu_ms", result.gpu_ms},
                         {"wall_ms", result.wall_ms},
                         {"wall_ratio", rates.wall_ratio},
                         {"tokens_per_second", rates.tokens_s},
                         {"stages", nlohmann::json::object()},
                         {"link_bytes", result.link_bytes},
                         {"link_gb_s", rates.link_gb_s},
                         {"link_share", Share(rates.link_gb_s, result.memcpy_gb_s)},
                         {"gather_gb_s", result.gather_gb_s},
                         {"gather_share", Share(result.gather_gb_s, result.memcpy_gb_s)},
                         {"rows_gb_s", result.rows_gb_s},
                         {"rows_share", Share(result.rows_gb_s, result.memcpy_gb_s)},
                         {"memcpy_gb_s", result.memcpy_gb_s},
                         {"hbm_bytes", result.hbm_bytes},
                         {"hbm_gb_s", rates.hbm_gb_s},
                         {"hbm_share", Share(rates.hbm_gb_s, result.hbm_copy_gb_s)},
                         {"scan_bytes", result.scan_bytes},
                         {"scan_gb_s", rates.scan_gb_s},
                         {"scan_share", Share(rates.scan_gb_s, result.hbm_copy_gb_s)},
                         {"hbm_copy_gb_s", result.hbm_copy_gb_s},
                         {"non_transfer_share", result.non_transfer_share},
                         {"read_bits", result.read_bits},
                         {"winners_per_head", result.winners_per_head},
                         {"row_modulus", result.row_modulus},
                         {"redone_lists", result.redone_lists},
                         {"random_index", result.random_index},
                         {"pinned", result.pinned}};
  for (const StepStage& stage : result.stages) json["stages"][stage.name] = stage.gpu_ms;
  if (const double ratio = StepRatio(report, row); ratio > 0) json["ratio"] = ratio;
  if (const Published* one = PublishedOf(report, row)) {
    json["published"] = {{"name", one->name},
                         {"gpu_ms", one->gpu_ms},
                         {"wall_ms", one->wall_ms},
                         {"ratio", kPublishedBaseline / one->gpu_ms}};
  }
  return json;
}

}  // namespace

double StepRatio(const StepReport& report, const StepRow& row) {
  if (!row.result) return 0;
  for (const StepRow& other : report.rows) {
    if (other.result && SameSetting(other, row) &&
        Canonical(other.method) == Canonical(kStepBaseline)) {
      return Share(other.result->gpu_ms, row.result->gpu_ms);
    }
  }
  return 0;
}

std::string StepTables(const StepReport& report) {
  std::string text = TimesTable(report);
  if (FirstResult(report) != nullptr) text += "\n" + BytesTable(report);
  return text + PublishedTable(report) + "\n" + Notes(report);
}

nlohmann::json StepJson(const StepReport& report) {
  const MachineInfo machine = DescribeMachine();
  const StepShape& shape = report.shape;
  nlohmann::json json = {{"bench", "step"},
                         {"processor", machine.processor},
                         {"n_processors", machine.n_processors},
                         {"memory_bytes", machine.total_bytes},
                         {"shape",
                          {{"name", shape.name},
                           {"n_layers", shape.n_layers},
                           {"n_embd", shape.n_embd},
                           {"n_ff", shape.n_ff},
                           {"n_vocab", shape.n_vocab},
                           {"n_heads", shape.heads.n_heads},
                           {"n_kv_heads", shape.heads.n_kv_heads},
                           {"head_dim", shape.heads.head_dim},
                           {"has_qk_norm", shape.has_qk_norm}}},
                         {"keys", KeysJson(report.keys)},
                         {"k", report.k},
                         {"baseline", kStepBaseline},
                         {"interrupted", report.interrupted},
                         {"rows", nlohmann::json::array()}};
  for (const StepRow& row : report.rows) {
    nlohmann::json one = {{"method", row.method},
                          {"n_tokens", row.n_tokens},
                          {"batch", row.batch},
                          {"placement", row.placement}};
    if (row.result) {
      one.update(ResultJson(report, row));
    } else {
      one["refusal"] = row.refusal;
    }
    json["rows"].push_back(std::move(one));
  }
  return json;
}

BarFigure StepFigure(const StepReport& report) {
  BarFigure figure;
  figure.title = "A decode step of " + report.shape.name + ", by stage";
  if (!report.keys.file.empty()) figure.title += ", " + KeysText(report.keys);
  if (const StepBenchResult* first = FirstResult(report)) figure.title += ", " + first->device;
  figure.x_label = "GPU ms per step";
  figure.parts.assign(std::begin(kStepStages), std::end(kStepStages));
  const StepRow* before = nullptr;
  for (const StepRow& row : report.rows) {
    if (before == nullptr || !SameSetting(*before, row)) {
      figure.panels.push_back({SettingText(row), {}});
    }
    before = &row;
    StackedBar bar;
    bar.name = row.method;
    if (row.result) {
      for (const std::string_view stage : kStepStages) {
        bar.parts.push_back(StageMs(*row.result, stage));
      }
      if (const double ratio = StepRatio(report, row); ratio > 0) bar.note = Times(ratio);
    } else {
      bar.note = "not measured";
    }
    figure.panels.back().bars.push_back(std::move(bar));
  }
  return figure;
}

}  // namespace fathom::cli
