// SPDX-License-Identifier: MIT
#include "eval_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "common.h"
#include "table.h"

namespace fathom::cli {
namespace {

std::vector<std::int64_t> KsOf(const ErrorReport& report) {
  std::vector<std::int64_t> ks;
  for (const ErrorRow& row : report.rows) ks.push_back(row.k);
  std::sort(ks.begin(), ks.end());
  ks.erase(std::unique(ks.begin(), ks.end()), ks.end());
  return ks;
}

std::string ShareText(std::int64_t k, std::int64_t n_tokens) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2g",
                100.0 * static_cast<double>(k) / static_cast<double>(n_tokens));
  return text.data();
}

// Appends spaces so that, right-aligned, the numbers of a column have their points below each
// other.
void AlignPoints(std::vector<std::string>* column) {
  const auto behind = [](const std::string& cell) {
    const auto point = cell.find('.');
    return point == std::string::npos ? 0 : cell.size() - point;
  };
  std::size_t most = 0;
  for (const std::string& cell : *column) most = std::max(most, behind(cell));
  for (std::string& cell : *column) cell.append(most - behind(cell), ' ');
}

// A table of text and then columns of numbers.
std::string AlignedTable(std::vector<std::string> header,
                         const std::vector<std::vector<std::string>>& columns) {
  Table table(std::move(header));
  std::vector<std::vector<std::string>> aligned = columns;
  for (std::size_t c = 1; c < aligned.size(); ++c) AlignPoints(&aligned[c]);
  for (std::size_t r = 0; r < columns.front().size(); ++r) {
    std::vector<std::string> row;
    row.reserve(aligned.size());
    for (const auto& column : aligned) row.push_back(column[r]);
    table.Add(row);
  }
  return table.ToString();
}

std::string MethodTable(const ErrorReport& report, std::int64_t k) {
  std::vector<std::vector<std::string>> columns(10);
  for (const ErrorRow& row : report.rows) {
    if (row.k != k) continue;
    const std::array<std::string, 10> cells = {row.method,
                                               row.read_bits > 0 ? Significant(row.read_bits) : "-",
                                               Significant(row.stored_bytes),
                                               Significant(row.rows),
                                               Significant(row.mean),
                                               Significant(row.mean_se),
                                               Significant(row.median),
                                               Significant(row.p99),
                                               Significant(row.recall),
                                               Significant(row.mass)};
    for (std::size_t c = 0; c < cells.size(); ++c) columns[c].push_back(cells.at(c));
  }
  return AlignedTable({"method", "read bits", "bytes/token", "rows/step", "mean error", "+- s.e.",
                       "median", "p99", "recall", "mass"},
                      columns);
}

std::string EqualErrorCell(const EqualErrorBits& match) {
  if (match.bits) return Significant(*match.bits);
  return match.below ? "<" + Significant(*match.below) : "-";
}

// A row per fixed scan, a column per curve; empty without either.
std::string EqualErrorTable(const std::vector<EqualErrorBits>& all, std::int64_t k) {
  std::vector<std::string> header = {"fixed scan", "its error", "its bits"};
  std::vector<std::vector<std::string>> columns(header.size());
  std::vector<std::string> curves;  // canonical
  std::string scan;
  for (const EqualErrorBits& match : all) {
    if (match.k != k) continue;
    // Scans come one after the other, each with every curve in the same order.
    if (columns[0].empty() || match.reference != scan) {
      scan = match.reference;
      columns[0].push_back(scan);
      columns[1].push_back(Significant(match.reference_error));
      columns[2].push_back(Significant(match.reference_bits));
    }
    auto curve = std::find(curves.begin(), curves.end(), match.curve_spec);
    if (curve == curves.end()) {
      curve = curves.insert(curve, match.curve_spec);
      header.push_back(match.curve);
      columns.emplace_back();
    }
    columns[static_cast<std::size_t>(curve - curves.begin()) + 3].push_back(EqualErrorCell(match));
  }
  if (curves.empty()) return "";
  return "\nread bits at equal error (<: better at its fewest bits already; -: not reached)\n" +
         AlignedTable(header, columns);
}

nlohmann::json GeometryJson(const CaptureGeometry& geometry) {
  nlohmann::json json = {{"n_tokens", geometry.n_tokens},
                         {"n_heads", geometry.heads.n_heads},
                         {"n_kv_heads", geometry.heads.n_kv_heads},
                         {"head_dim", geometry.heads.head_dim},
                         {"layers", geometry.layers},
                         {"q_positions", geometry.q_positions},
                         {"stats_positions", geometry.stats_positions},
                         {"model", geometry.model},
                         {"architecture", geometry.architecture},
                         {"rope", geometry.rope},
                         {"text", geometry.text},
                         {"qk_norm", nullptr},
                         {"qkv_bias", nullptr}};
  if (geometry.has_qk_norm) json["qk_norm"] = *geometry.has_qk_norm;
  if (geometry.has_qkv_bias) json["qkv_bias"] = *geometry.has_qkv_bias;
  return json;
}

nlohmann::json RowJson(const ErrorRow& row) {
  return {{"method", row.method},
          {"spec", row.spec},
          {"k", row.k},
          {"read_bits", row.read_bits},
          {"stored_bytes", row.stored_bytes},
          {"rows", row.rows},
          {"mean", row.mean},
          {"mean_se", row.mean_se},
          {"median", row.median},
          {"p99", row.p99},
          {"recall", row.recall},
          {"recall_se", row.recall_se},
          {"mass", row.mass},
          {"mass_se", row.mass_se},
          {"samples", row.samples},
          {"layer_mean", row.layer_mean}};
}

nlohmann::json EqualErrorJson(const EqualErrorBits& match) {
  nlohmann::json json = {{"reference", match.reference},
                         {"curve", match.curve},
                         {"curve_spec", match.curve_spec},
                         {"k", match.k},
                         {"reference_bits", match.reference_bits},
                         {"reference_error", match.reference_error},
                         {"bits", nullptr},
                         {"below", nullptr}};
  if (match.bits) json["bits"] = *match.bits;
  if (match.below) json["below"] = *match.below;
  return json;
}

PlotKind KindOf(const ErrorRow& row) {
  const std::string name = MethodSpec::Parse(row.spec).name;
  if (name == "fathom") return PlotKind::kCurve;
  // `exact` reads whole keys, far right of every index; what scans nothing has no place on the
  // axis.
  return name == "exact" || !(row.read_bits > 0) ? PlotKind::kLevel : PlotKind::kPoint;
}

PlotPanel ErrorPanel(const ErrorRun& run, std::int64_t k) {
  const ErrorReport& report = run.report;
  PlotPanel panel;
  panel.title = std::filesystem::path(report.capture).filename().string();
  if (run.statistics != kOwnStatistics) panel.title += ", statistics: " + run.statistics;
  panel.subtitle = "k = " + Grouped(k) + " of " + Grouped(report.geometry.n_tokens) + " tokens (" +
                   ShareText(k, report.geometry.n_tokens) + " %); " +
                   std::to_string(report.layers.size()) + " layers, " +
                   Grouped(report.n_positions) + " positions";
  std::vector<std::string> specs;  // [series]
  for (const ErrorRow& row : report.rows) {
    if (row.k != k) continue;
    const PlotKind kind = KindOf(row);
    const std::string spec = kind == PlotKind::kCurve ? CurveOf(row.spec) : row.spec;
    auto at = std::find(specs.begin(), specs.end(), spec);
    if (at == specs.end()) {
      at = specs.insert(at, spec);
      panel.series.push_back(
          {kind == PlotKind::kCurve ? CurveOf(row.method) : row.method, kind, {}});
    } else if (kind != PlotKind::kCurve) {
      continue;  // the same method again
    }
    panel.series[static_cast<std::size_t>(at - specs.begin())].points.push_back(
        {row.read_bits, row.mean, row.mean_se});
  }
  for (PlotSeries& series : panel.series) {
    std::stable_sort(series.points.begin(), series.points.end(),
                     [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
  }
  return panel;
}

}  // namespace

std::string Significant(double value) {
  if (value == 0) return "0";
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
  std::array<char, 32> text{};
  // From 10,000 on %g would write an exponent.
  const bool large = std::abs(value) >= 9999.5 && std::abs(value) < 1e12;
  std::snprintf(text.data(), text.size(), large ? "%.0f" : "%#.4g", value);
  std::string shown = text.data();
  if (shown.back() == '.') shown.pop_back();
  return shown;
}

std::string ErrorTables(const ErrorRun& run) {
  const ErrorReport& report = run.report;
  const HeadGeometry& heads = report.geometry.heads;
  std::string text = report.capture + ": " + Grouped(report.geometry.n_tokens) + " tokens, " +
                     std::to_string(report.layers.size()) + " layers, " +
                     std::to_string(heads.n_heads) + " query and " +
                     std::to_string(heads.n_kv_heads) + " KV heads of " +
                     std::to_string(heads.head_dim) + ", " + Grouped(report.n_positions) +
                     " positions; statistics: " + run.statistics + ", " +
                     Grouped(report.built_tokens) + " tokens\n";
  const std::vector<EqualErrorBits> equal = FindEqualErrorBits(report.rows);
  for (const std::int64_t k : KsOf(report)) {
    text += "\nk = " + Grouped(k) + " (" + ShareText(k, report.geometry.n_tokens) +
            " % of the context)\n" + MethodTable(report, k) + EqualErrorTable(equal, k);
  }
  return text;
}

nlohmann::json ErrorRunJson(const ErrorRun& run) {
  const ErrorReport& report = run.report;
  nlohmann::json json = {{"capture", report.capture},
                         {"geometry", GeometryJson(report.geometry)},
                         {"layers", report.layers},
                         {"n_positions", report.n_positions},
                         {"built_tokens", report.built_tokens},
                         {"statistics", run.statistics},
                         {"seconds", run.seconds},
                         {"rows", nlohmann::json::array()},
                         {"equal_error", nlohmann::json::array()}};
  for (const ErrorRow& row : report.rows) json["rows"].push_back(RowJson(row));
  for (const EqualErrorBits& match : FindEqualErrorBits(report.rows))
    json["equal_error"].push_back(EqualErrorJson(match));
  return json;
}

PlotFigure ErrorFigure(const std::vector<ErrorRun>& runs) {
  PlotFigure figure;
  figure.title = "Error of sparse attention over the bits that a scan reads";
  figure.x_label = "read bits per token and KV head";
  figure.y_label = "mean relative L2 error of the output";
  for (std::size_t c = 0; c < runs.size(); ++c) {
    const std::vector<std::int64_t> ks = KsOf(runs[c].report);
    for (std::size_t r = 0; r < ks.size(); ++r) {
      if (figure.rows.size() <= r) figure.rows.emplace_back(runs.size());
      figure.rows[r][c] = ErrorPanel(runs[c], ks[r]);
    }
  }
  return figure;
}

}  // namespace fathom::cli
