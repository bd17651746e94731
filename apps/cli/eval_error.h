// SPDX-License-Identifier: MIT
// `fathom eval error`: what each method loses of dense attention's output on captures of real
// models.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.h"
#include "fathom/eval.h"

namespace fathom::cli {

struct EvalErrorOptions {
  std::vector<std::string> captures;
  std::vector<std::string> methods;  // lists of specs, see SplitSpecs; empty: those of the preset
  std::vector<std::string> k;        // see ParseK; empty: those of the preset
  std::string layers;                // see ParseLayers; empty: all of the capture
  std::int64_t every = 1;
  double freeze = 0;
  std::string metric = "scaled";
  std::string fit = "earlier";
  std::string basis;            // added to specs; empty: none
  std::string statistics_file;  // empty: the captures' own
  std::string qk_norm;          // "yes", "no", or empty: as the capture says
  std::string preset = "table";
  int threads = 0;
  std::string backend = "cpu";
  bool json = false;
  std::string output;  // file for the JSON document, empty for none
  std::string svg;     // file for the picture, empty for none
};

// Tokens per query head, ascending, without repeats, of texts such as "128", "2k" or "1.6%" (of
// n_tokens). Throws Error(kUsage) for a text that is no such number and for fewer than the 37
// tokens with which selection begins. may_skip: leaves out shares that come to less instead, as
// lists made for longer captures need, but not all of them.
std::vector<std::int64_t> ParseK(const std::vector<std::string>& texts, std::int64_t n_tokens,
                                 bool may_skip);

// The specs with basis=BASIS added where the method has that option and the spec does not give it.
std::vector<std::string> WithBasis(std::vector<std::string> specs, const std::string& basis);

void AddEvalErrorCommand(Command eval, int* exit_code);

}  // namespace fathom::cli
