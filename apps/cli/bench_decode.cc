// SPDX-License-Identifier: MIT
// `fathom bench decode`: decode speed against context, for any list of methods and, in the same
// run, for libllama.
//
// One growing prefill serves all methods: at each context every method indexes the same rows,
// decodes the same tokens and is rolled back. A step's input varies (the text goes on) and the
// median is reported.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench.h"
#include "bench_llama.h"
#include "bench_machine.h"
#include "common.h"
#include "progress.h"
#include "table.h"

namespace fathom::cli {
namespace {

constexpr std::int64_t kBaseContext = 64;  // where attention costs next to nothing

struct BenchOptions {
  std::string model;
  std::string file;
  std::vector<std::string> contexts = {"2k", "4k", "8k", "16k", "32k"};
  std::vector<std::string> methods = {"dense", "fathom:bits=28,k=512",
                                      "fathom:preset=paper,budget=48,k=512"};
  std::int64_t steps = 24;
  int threads = 0;
  std::string backend = "cpu";
  std::string device = "cpu";
  std::string decode_attention = "device";
  std::string statistics_file;  // empty: the prefill's own
  bool no_llama = false;
  std::string llama_flash = "both";
  bool json = false;
};

struct Sample {
  std::int64_t context = 0;
  std::string runner;
  bool ours = false;
  double step_ms = 0;
  double attention_ms = 0;  // measured for ours; for libllama its step less its step at 64 tokens
  double read_bits = 0;
  double index_bytes = 0;  // per step
  double row_bytes = 0;
  double prefill_tokens_s = 0;  // of the tokens from the previous context to this one
};

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Text repeated until there are enough tokens for the longest context and its steps.
std::vector<Token> BenchTokens(const Model& model, const BenchOptions& options, std::int64_t need) {
  const std::string text = ReadText(options.file);
  std::vector<Token> once = model.Tokenize(text, false);
  if (once.empty()) throw Error(ErrorCode::kUsage, "'" + options.file + "' has no text to prefill");
  std::vector<Token> tokens;
  if (model.bos() >= 0) tokens.push_back(model.bos());
  while (static_cast<std::int64_t>(tokens.size()) < need)
    tokens.insert(tokens.end(), once.begin(), once.end());
  tokens.resize(static_cast<std::size_t>(need));
  return tokens;
}

Sample MeasureMethod(Session& session, const std::string& spec, std::span<const Token> next) {
  const std::int64_t context = session.n_tokens();
  session.SetMethod(spec);
  session.BuildIndex();
  constexpr std::size_t kWarmUp = 2;
  std::vector<double> step;
  std::vector<double> attention;
  for (std::size_t i = 0; i < next.size(); ++i) {
    if (i == kWarmUp) session.method().ResetCounters();
    session.ResetTimes();
    session.Decode(next[i]);
    if (i < kWarmUp) continue;
    step.push_back(session.times().decode_s * 1000);
    attention.push_back(session.times().decode_attention_s * 1000);
  }
  const MethodCounters& counters = session.method().counters();
  const auto steps = static_cast<double>(std::max<std::int64_t>(counters.steps, 1));
  Sample sample;
  sample.context = context;
  sample.runner = spec;
  sample.ours = true;
  sample.step_ms = Median(step);
  sample.attention_ms = Median(attention);
  sample.read_bits = counters.mean_read_bits();
  sample.index_bytes = static_cast<double>(counters.index_bytes) / steps;
  sample.row_bytes = static_cast<double>(counters.row_bytes) / steps;
  session.Truncate(context);
  return sample;
}

Sample MeasureLlama(LlamaRival& rival, std::span<const Token> next) {
  const std::int64_t context = rival.n_tokens();
  std::vector<double> step;
  for (std::size_t i = 0; i < next.size(); ++i) {
    const double start = Now();
    rival.Append(next.subspan(i, 1));
    if (i >= 2) step.push_back((Now() - start) * 1000);
  }
  rival.Truncate(context);
  Sample sample;
  sample.context = context;
  sample.runner = rival.name();
  sample.step_ms = Median(step);
  return sample;
}

void StopIfInterrupted() {
  if (Interrupted())
    throw Error(ErrorCode::kCancelled, "interrupted; what was measured is reported");
}

void MeasureOurs(const std::shared_ptr<const Model>& model, const BenchOptions& options,
                 const std::vector<std::int64_t>& contexts, std::span<const Token> tokens,
                 std::vector<Sample>* samples) {
  SessionOptions session_options;
  session_options.ctx_size = static_cast<std::int64_t>(tokens.size());
  session_options.backend = options.backend;
  session_options.device = options.device;
  session_options.decode_attention = options.decode_attention;
  session_options.n_threads = options.threads;
  session_options.calibration = LoadStatistics(options.statistics_file);
  Session session(model, session_options);
  for (const std::int64_t context : contexts) {
    const auto at = static_cast<std::size_t>(session.n_tokens());
    session.ResetTimes();
    {
      Progress progress("fathom, to " + Grouped(context), "tokens");
      session.Prefill(tokens.subspan(at, static_cast<std::size_t>(context) - at),
                      [&](std::int64_t done, std::int64_t total) {
                        progress.Update(done, total);
                        return !Interrupted();
                      });
    }
    const double rate =
        static_cast<double>(context - static_cast<std::int64_t>(at)) / session.times().prefill_s;
    for (const std::string& spec : options.methods) {
      StopIfInterrupted();
      samples->push_back(
          MeasureMethod(session, spec,
                        tokens.subspan(static_cast<std::size_t>(context),
                                       static_cast<std::size_t>(options.steps + 2))));
      samples->back().prefill_tokens_s = rate;
      std::fprintf(stderr, "%s at %s: %.2f ms/token\n", spec.c_str(), Grouped(context).c_str(),
                   samples->back().step_ms);
    }
  }
}

void MeasureRival(const BenchOptions& options, bool flash_attention, int threads,
                  const std::vector<std::int64_t>& contexts, std::span<const Token> tokens,
                  std::vector<Sample>* samples) {
  LlamaRival rival(options.model, static_cast<std::int64_t>(tokens.size()), flash_attention,
                   threads);
  double base_ms = 0;
  for (const std::int64_t context : contexts) {
    const auto from = static_cast<std::size_t>(rival.n_tokens());
    const double start = Now();
    {
      Progress progress(rival.name() + ", to " + Grouped(context), "tokens");
      constexpr std::size_t kChunk = 512;
      for (std::size_t at = from; at < static_cast<std::size_t>(context); at += kChunk) {
        StopIfInterrupted();
        rival.Append(tokens.subspan(at, std::min(kChunk, static_cast<std::size_t>(context) - at)));
        progress.Update(rival.n_tokens() - static_cast<std::int64_t>(from),
                        context - static_cast<std::int64_t>(from));
      }
    }
    const double rate =
        static_cast<double>(context - static_cast<std::int64_t>(from)) / (Now() - start);
    Sample sample =
        MeasureLlama(rival, tokens.subspan(static_cast<std::size_t>(context),
                                           static_cast<std::size_t>(options.steps + 2)));
    sample.prefill_tokens_s = rate;
    if (context == kBaseContext) base_ms = sample.step_ms;
    sample.attention_ms = std::max(sample.step_ms - base_ms, 0.0);
    samples->push_back(sample);
    std::fprintf(stderr, "%s at %s: %.2f ms/token\n", sample.runner.c_str(),
                 Grouped(context).c_str(), sample.step_ms);
  }
}

// libllama's best sample at a context, null without rivals.
const Sample* BestRival(const std::vector<Sample>& samples, std::int64_t context) {
  const Sample* best = nullptr;
  for (const Sample& sample : samples) {
    if (sample.ours || sample.context != context) continue;
    if (best == nullptr || sample.step_ms < best->step_ms) best = &sample;
  }
  return best;
}

// Index and rows that attention reads per second, 1e9 bytes; 0 for libllama, whose attention is not
// measured by itself.
double AttentionGbS(const Sample& sample) {
  if (!sample.ours || sample.attention_ms <= 0) return 0;
  return (sample.index_bytes + sample.row_bytes) / (sample.attention_ms / 1000) / 1e9;
}

void PrintTable(const std::vector<Sample>& samples, const std::vector<std::int64_t>& contexts,
                const MachineSpeed& speed) {
  Table table({"runner", "context", "tokens/s", "step ms", "attention ms", "vs libllama",
               "attention vs", "read bits", "index/step", "rows/step", "GB/s", "of read bw",
               "prefill tok/s"});
  for (const std::int64_t context : contexts) {
    const Sample* best = BestRival(samples, context);
    for (const Sample& sample : samples) {
      if (sample.context != context) continue;
      // That of steps wholly on a device is not timed by itself.
      const bool known = sample.ours ? sample.attention_ms > 0 : context != kBaseContext;
      table.Add({sample.runner, Grouped(context), Fixed(1000 / sample.step_ms, 1),
                 Fixed(sample.step_ms, 2), known ? Fixed(sample.attention_ms, 2) : "-",
                 best != nullptr ? Fixed(best->step_ms / sample.step_ms, 2) + "x" : "-",
                 best != nullptr && known && context != kBaseContext
                     ? Fixed(best->attention_ms / std::max(sample.attention_ms, 1e-6), 2) + "x"
                     : "-",
                 sample.ours ? Fixed(sample.read_bits, 1) : "-",
                 sample.ours ? ByteText(sample.index_bytes) : "-",
                 sample.ours ? ByteText(sample.row_bytes) : "-",
                 sample.ours ? Fixed(AttentionGbS(sample), 2) : "-",
                 sample.ours ? Fixed(AttentionGbS(sample) / speed.read_gb_s * 100, 0) + " %" : "-",
                 Fixed(sample.prefill_tokens_s, 0)});
    }
  }
  std::printf("%s", table.ToString().c_str());
}

nlohmann::json SampleJson(const std::vector<Sample>& samples, const Sample& sample,
                          const MachineSpeed& speed) {
  nlohmann::json json = {{"runner", sample.runner},
                         {"context", sample.context},
                         {"tokens_per_second", 1000 / sample.step_ms},
                         {"step_ms", sample.step_ms},
                         {"attention_ms", sample.attention_ms},
                         {"read_bits", sample.read_bits},
                         {"index_bytes_per_step", sample.index_bytes},
                         {"row_bytes_per_step", sample.row_bytes},
                         {"prefill_tokens_per_second", sample.prefill_tokens_s}};
  if (const Sample* best = BestRival(samples, sample.context)) {
    json["ratio"] = best->step_ms / sample.step_ms;
  }
  if (const double gb_s = AttentionGbS(sample); gb_s > 0) {
    json["gb_s"] = gb_s;
    json["read_share"] = gb_s / speed.read_gb_s;
  }
  return json;
}

void PrintJson(const std::vector<Sample>& samples, const BenchOptions& options,
               const MachineSpeed& speed, const std::string& backend) {
  nlohmann::json json;
  json["model"] = options.model;
  json["threads"] = speed.threads;
  json["backend"] = backend;
  json["device"] = options.device;
  json["steps"] = options.steps;
  json["stats_file"] = options.statistics_file;
  json["processor"] = DescribeMachine().processor;
  json["interrupted"] = Interrupted();
  json["samples"] = nlohmann::json::array();
  json["machine"] = nlohmann::json::array();
  json["machine"].push_back({{"threads", speed.threads},
                             {"read_gb_s", speed.read_gb_s},
                             {"fma_gflop_s", speed.fma_gflop_s}});
  for (const Sample& sample : samples) {
    json["samples"].push_back(SampleJson(samples, sample, speed));
  }
  WriteOut(JsonText(json));
}

int BenchDecode(const BenchOptions& options) {
  for (const std::string& spec : options.methods) ValidateMethodSpec(MethodSpec::Parse(spec));
  std::vector<std::int64_t> contexts = {kBaseContext};
  for (const std::string& text : options.contexts) contexts.push_back(ParseTokens(text));
  std::sort(contexts.begin(), contexts.end());
  contexts.erase(std::unique(contexts.begin(), contexts.end()), contexts.end());
  const auto model = Model::Open(options.model);
  const std::vector<Token> tokens =
      BenchTokens(*model, options, contexts.back() + options.steps + 2);
  const auto backend = MakeBackend(options.backend, options.threads);
  const int threads = backend->n_threads();
  const MachineSpeed speed = MeasureMachine({threads}).front();

  std::vector<Sample> samples;
  try {
    MeasureOurs(model, options, contexts, tokens, &samples);
    for (const bool flash : {false, true}) {
      if (options.no_llama || options.llama_flash == (flash ? "off" : "on")) continue;
      MeasureRival(options, flash, threads, contexts, tokens, &samples);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    std::fprintf(stderr, "fathom: %s\n", error.what());
  }
  if (options.json) {
    PrintJson(samples, options, speed, std::string(backend->name()));
  } else {
    PrintTable(samples, contexts, speed);
    std::printf(
        "median of %s steps, %d threads, %s; libllama: f16 KV cache, its attention is its step "
        "less its step at %s "
        "tokens\nGB/s of index and rows while attention runs; memory reads %.1f GB/s in this run\n",
        Grouped(options.steps).c_str(), threads, std::string(backend->name()).c_str(),
        Grouped(kBaseContext).c_str(), speed.read_gb_s);
  }
  return Interrupted() ? kExitInterrupted : kExitOk;
}

}  // namespace

void AddBenchDecode(Command bench, int* exit_code) {
  auto options = std::make_shared<BenchOptions>();
  Command decode = bench.AddCommand("decode", "Decode speed against context, beside libllama's");
  decode.AddOption("-m,--model", options->model, "GGUF model").Required();
  decode.AddOption("-f,--file", options->file, "text to prefill, repeated as needed").Required();
  decode.AddOption("--ctx", options->contexts, "contexts, e.g. 2k,8k,32k")
      .SeparatedBy(',')
      .ShowDefault();
  decode.AddOption("--methods", options->methods, "method specs, separated by spaces")
      .ShowDefault();
  decode.AddOption("--steps", options->steps, "timed steps per point")
      .ShowDefault()
      .InRange(1, 100000);
  AddMachineOptions(decode, &options->threads, &options->backend);
  AddDeviceOptions(decode, &options->device, &options->decode_attention);
  decode.AddOption("--stats-file", options->statistics_file, kStatsFileHelp).TypeName("FILE");
  decode.AddFlag("--no-llama", options->no_llama, "leave libllama out");
  decode
      .AddOption("--llama-flash", options->llama_flash,
                 "libllama's flash attention: off, on, or both one after the other")
      .ShowDefault()
      .OneOf({"off", "on", "both"});
  decode.AddFlag("--json", options->json, "print one JSON document");
  decode.OnRun([options, exit_code] { *exit_code = BenchDecode(*options); });
}

}  // namespace fathom::cli
