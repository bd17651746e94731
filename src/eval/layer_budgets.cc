// SPDX-License-Identifier: MIT
#include <charconv>
#include <numeric>
#include <string>

#include "fathom/calibrate.h"
#include "fathom/error.h"

namespace fathom {
namespace {

constexpr double kRounding = 1e-9;  // means of bits that are equal but for rounding

std::string NumberText(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

}  // namespace

std::vector<double> PlanLayerBudgets(std::span<const double> candidates,
                                     std::span<const std::vector<double>> errors, double mean) {
  // False for NaN.
  if (!(mean >= candidates.front() && mean <= candidates.back())) {
    throw Error(ErrorCode::kUsage, "a mean budget of " + NumberText(mean) +
                                       " bits is outside the candidates of a layer; give " +
                                       NumberText(candidates.front()) + " to " +
                                       NumberText(candidates.back()));
  }
  const std::size_t n_layers = errors.front().size();
  std::vector<std::size_t> level(n_layers);
  const double total = mean * static_cast<double>(n_layers) + kRounding;
  double spent = candidates.front() * static_cast<double>(n_layers);
  for (;;) {
    std::size_t best = n_layers;
    double best_gain = 0;
    for (std::size_t layer = 0; layer < n_layers; ++layer) {
      const std::size_t next = level[layer] + 1;
      if (next == candidates.size()) continue;
      const double added = candidates[next] - candidates[level[layer]];
      if (spent + added > total) continue;
      const double gain = (errors[level[layer]][layer] - errors[next][layer]) / added;
      if (best != n_layers && !(gain > best_gain)) continue;
      best = layer;
      best_gain = gain;
    }
    if (best == n_layers) break;
    spent += candidates[level[best] + 1] - candidates[level[best]];
    ++level[best];
  }
  std::vector<double> bits(n_layers);
  for (std::size_t layer = 0; layer < n_layers; ++layer) bits[layer] = candidates[level[layer]];
  return bits;
}

}  // namespace fathom
