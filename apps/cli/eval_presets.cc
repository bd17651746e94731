// SPDX-License-Identifier: MIT
#include "eval_presets.h"

#include <algorithm>
#include <array>

#include "fathom/error.h"

namespace fathom::cli {
namespace {

using Specs = std::vector<std::string>;

// head with each value appended to it: At("fathom:bits=", {"19", "28"}).
Specs At(const std::string& head, const Specs& values, const std::string& tail = "") {
  Specs specs;
  for (const std::string& value : values) specs.push_back(head + value + tail);
  return specs;
}

Specs Paper(const Specs& budgets, const std::string& tail = "") {
  return At("fathom:preset=paper,budget=", budgets, tail);
}

// Ours without the residual mass, so that what remains is the error of the scan.
Specs Scan(const Specs& bits, const std::string& tail = "") {
  return At("fathom:bits=", bits, ",residual=off" + tail);
}

Specs Join(std::initializer_list<Specs> parts) {
  Specs all;
  for (const Specs& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// The paper's: each changes one choice and holds the rest. Labels in brackets are the paper's.
std::vector<EvalPreset> PaperAblations() {
  std::vector<EvalPreset> presets;
  presets.push_back({"ablation-layers",
                     "[A1] per-layer plan against flat budgets; needs --stats-file with budgets",
                     Join({Paper({"48", "64"}), Paper({"48", "64"}, ",budgets=file"),
                           At("fathom:bits=", {"28", "28,budgets=file"})}),
                     {},
                     true});
  presets.push_back({"ablation-basis",
                     "[A2] raw, rotated (klt) and balanced planes at budgets 48 and 64",
                     Join({Paper({"48", "64"}, ",basis=raw"), Paper({"48", "64"}, ",basis=klt"),
                           Paper({"48", "64"}, ",basis=balanced")}),
                     {}});
  presets.push_back({"ablation-ratio",
                     "[A3] selection ratio: k of 0.1, 0.4 and 1.6 % of the context",
                     Join({{"exact", "double-sparsity", "sparq", "loki"},
                           Paper({"48", "64"}),
                           At("fathom:bits=", {"19", "28", "37"})}),
                     {"0.1%", "0.4%", "1.6%"}});
  presets.push_back(
      {"ablation-depth",
       "[A4] uniform depth (two planes of all channels) against water-filled depth",
       Join({{"exact", "thumbnail"}, Paper({"48", "64", "80", "96", "128", "192", "256"})}),
       {}});
  presets.push_back({"ablation-sparq",
                     "[A5, B4] SparQ's channels chosen per group and per query head",
                     Join({At("sparq:r=", {"16", "32"}, ",channels=group"),
                           At("sparq:r=", {"16", "32"}, ",channels=head"),
                           Paper({"40", "48", "64", "80", "128"})}),
                     {}});
  presets.push_back(
      {"ablation-store",
       "[B1] store precision: all of the 4-bit store, and our mean store at equal bits; the "
       "paper's 8-bit and rate-allocated stores cannot be held by a format of 4 planes",
       Join({{"exact", "full4"},
             Paper({"48", "64", "128"}),
             Scan({"28", "56", "74", "146"}, ",store=paper"),
             Scan({"28", "56", "74", "146"}, ",store=mean")}),
       {}});
  presets.push_back({"ablation-loki",
                     "[B2] loss by rank and by quantization: Loki r=32 in fp16 and 4 bits, r=64",
                     {"exact", "loki:r=32,rule=author", "loki:r=32", "loki:r=64"},
                     {}});
  presets.push_back({"ablation-active",
                     "[B3] active channels: read bits less the budget are a quarter bit of each",
                     Paper({"40", "48", "64", "80", "128"}),
                     {}});
  presets.push_back({"ablation-calibration",
                     "[B5] statistics of the own prefill against those of --stats-file",
                     Join({{"double-sparsity", "loki"},
                           Paper({"48", "64"}),
                           At("fathom:bits=", {"19", "28", "37"})}),
                     {},
                     true,
                     true});
  return presets;
}

// Parts of our own read, each switched alone. Without the residual where the scan is judged: the
// residual makes up for part of what a worse scan loses.
std::vector<EvalPreset> OwnAblations() {
  const Specs bits = {"19", "28", "37"};
  std::vector<EvalPreset> presets;
  presets.push_back({"own-means",
                     "block means and frozen steps against block scales, at equal bits",
                     Join({Scan(bits, ",store=paper"), Scan(bits, ",store=mean")}),
                     {}});
  presets.push_back({"own-decoders",
                     "decoders fitted by least squares against cell centres",
                     Join({Scan(bits, ",weights=center"), Scan(bits, ",weights=lsq"),
                           At("fathom:bits=", bits, ",weights=center"),
                           At("fathom:bits=", bits, ",weights=lsq")}),
                     {}});
  presets.push_back({"own-plan",
                     "plan by measured distortion, by the published law, one multiplier for all",
                     Join({Scan(bits, ",plan=measured"), Scan(bits, ",plan=published"),
                           Scan(bits, ",plan=common")}),
                     {}});
  presets.push_back({"own-range",
                     "planes that reach as far as measured against twice the rms",
                     Join({Scan(bits, ",range=measured"), Scan(bits, ",range=rms")}),
                     {}});
  presets.push_back(
      {"own-basis",
       "raw, rotated (klt) and balanced planes of our read",
       Join({Scan(bits, ",basis=raw"), Scan(bits, ",basis=klt"), Scan(bits, ",basis=balanced")}),
       {}});
  presets.push_back(
      {"own-residual",
       "residual mass off, by the mean value and by block; on exact selection too",
       Join({At("exact:residual=", {"off", "mean", "block"}),
             At("fathom:bits=", bits, ",residual=off"), At("fathom:bits=", bits, ",residual=mean"),
             At("fathom:bits=", bits, ",residual=block")}),
       {}});
  presets.push_back({"own-meanbits",
                     "block means of 4 and of 8 bits",
                     Join({Scan(bits, ",meanbits=4"), Scan(bits, ",meanbits=8")}),
                     {}});
  return presets;
}

std::vector<EvalPreset> MakePresets() {
  std::vector<EvalPreset> presets;
  presets.push_back(
      {"table", "all methods at their usual points (the default)", DefaultMethods(), {}});
  for (auto& preset : PaperAblations()) presets.push_back(std::move(preset));
  for (auto& preset : OwnAblations()) presets.push_back(std::move(preset));
  return presets;
}

}  // namespace

std::vector<std::string> DefaultK() { return {"0.4%", "1.6%", "6%"}; }

std::vector<std::string> DefaultMethods() {
  return Join({{"exact", "exact:residual=block", "double-sparsity", "sparq:r=16", "sparq", "loki",
                "loki:r=64", "thumbnail", "landmark", "quest", "full4", "h2o", "streaming"},
               Paper({"48", "64", "80"}),
               Scan({"13", "19", "27", "37", "56", "70"}),
               At("fathom:bits=", {"13", "19", "28", "37"}),
               {"fathom:bits=28,residual=mean", "fathom:bits=28,basis=balanced"}});
}

const std::vector<EvalPreset>& EvalPresets() {
  static const std::vector<EvalPreset> kPresets = MakePresets();
  return kPresets;
}

const EvalPreset& FindEvalPreset(std::string_view name) {
  std::string valid;
  for (const EvalPreset& preset : EvalPresets()) {
    if (preset.name == name) return preset;
    valid += (valid.empty() ? "" : ", ") + preset.name;
  }
  throw Error(ErrorCode::kUsage,
              "unknown preset '" + std::string(name) + "'; valid: list, " + valid);
}

std::string EvalPresetList() {
  std::size_t width = 0;
  for (const EvalPreset& preset : EvalPresets()) width = std::max(width, preset.name.size());
  std::string text;
  for (const EvalPreset& preset : EvalPresets()) {
    text +=
        preset.name + std::string(width + 2 - preset.name.size(), ' ') + preset.description + "\n";
  }
  return text;
}

}  // namespace fathom::cli
