// SPDX-License-Identifier: MIT
// `fathom info`: the machine, its backends, the methods, and what a model and its sessions need.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "common.h"
#include "table.h"

namespace fathom::cli {
namespace {

struct InfoOptions {
  std::string model;
  std::vector<std::string> contexts;
  std::string method = "fathom";
  bool json = false;
};

nlohmann::json BackendsJson() {
  nlohmann::json list = nlohmann::json::array();
  for (const BackendInfo& backend : ListBackends()) {
    list.push_back({{"name", backend.name},
                    {"description", backend.description},
                    {"available", backend.available},
                    {"reason", backend.reason}});
  }
  return list;
}

nlohmann::json MethodsJson() {
  nlohmann::json list = nlohmann::json::array();
  for (const MethodInfo& method : ListMethods()) {
    list.push_back(
        {{"name", method.name}, {"summary", method.summary}, {"options", method.options}});
  }
  return list;
}

nlohmann::json ModelJson(const ModelInfo& model) {
  return {{"path", model.path},
          {"name", model.name},
          {"architecture", model.architecture},
          {"weight_types", model.weight_types},
          {"file_bytes", model.file_bytes},
          {"repacked_bytes", model.repacked_bytes},
          {"n_parameters", model.n_parameters},
          {"n_layers", model.n_layers},
          {"n_embd", model.n_embd},
          {"n_ff", model.n_ff},
          {"n_vocab", model.n_vocab},
          {"n_ctx_train", model.n_ctx_train},
          {"n_heads", model.heads.n_heads},
          {"n_kv_heads", model.heads.n_kv_heads},
          {"group", model.heads.group()},
          {"head_dim", model.heads.head_dim},
          {"qk_norm", model.has_qk_norm},
          {"qkv_bias", model.has_qkv_bias},
          {"tied_output", model.tied_output},
          {"rope", model.rope}};
}

nlohmann::json MemoryJson(const ModelInfo& model, const MethodSpec& method,
                          const std::vector<std::int64_t>& contexts) {
  nlohmann::json list = nlohmann::json::array();
  for (const std::int64_t n : contexts) {
    const SessionMemory memory = EstimateMemory(model, method, n, SessionOptions{}.chunk);
    list.push_back({{"n_tokens", n},
                    {"rows_bytes", memory.rows_bytes},
                    {"index_bytes", memory.index_bytes},
                    {"workspace_bytes", memory.workspace_bytes},
                    {"weights_bytes", memory.weights_bytes},
                    {"total_bytes", memory.total()},
                    {"fits", memory.total() <= memory.available_bytes}});
  }
  return list;
}

void PrintModel(const ModelInfo& model) {
  const auto yes = [](bool value) { return value ? "yes" : "no"; };
  std::printf("\nmodel       %s\n", model.path.c_str());
  if (!model.name.empty()) std::printf("name        %s\n", model.name.c_str());
  std::printf("what        %s, %s parameters, %s, %s\n", model.architecture.c_str(),
              Grouped(model.n_parameters).c_str(),
              ByteText(static_cast<double>(model.file_bytes)).c_str(), model.weight_types.c_str());
  std::printf("shape       %d layers, hidden %d, feed-forward %d, vocabulary %d\n", model.n_layers,
              model.n_embd, model.n_ff, model.n_vocab);
  std::printf(
      "heads       %d query, %d key/value (group %d), head_dim %d; QK-norm %s, q/k/v bias %s, tied "
      "output %s\n",
      model.heads.n_heads, model.heads.n_kv_heads, model.heads.group(), model.heads.head_dim,
      yes(model.has_qk_norm), yes(model.has_qkv_bias), yes(model.tied_output));
  std::printf("positions   %s; made for %s tokens\n", model.rope.c_str(),
              Grouped(model.n_ctx_train).c_str());
}

std::string FitText(const ModelInfo& model, const SessionMemory& memory, std::int64_t n_tokens) {
  if (memory.total() > memory.available_bytes) return "no";
  return n_tokens > model.n_ctx_train ? "yes, but the model was made for less" : "yes";
}

void PrintMemory(const ModelInfo& model, const MethodSpec& method,
                 const std::vector<std::int64_t>& contexts) {
  Table table({"session of", "rows", "index", "workspace", "weights", "total", "fits"});
  for (const std::int64_t n : contexts) {
    const SessionMemory memory = EstimateMemory(model, method, n, SessionOptions{}.chunk);
    const auto cell = [](std::int64_t bytes) { return ByteText(static_cast<double>(bytes)); };
    table.Add({Grouped(n) + " tokens", cell(memory.rows_bytes), cell(memory.index_bytes),
               cell(memory.workspace_bytes), cell(memory.weights_bytes), cell(memory.total()),
               FitText(model, memory, n)});
  }
  std::printf("\n%s(method %s)\n", table.ToString().c_str(), method.ToString().c_str());
}

void PrintMachine() {
  const MachineInfo machine = DescribeMachine();
  std::printf(
      "fathom      %s\nprocessor   %s, %d usable\nfeatures    %s\nmemory      %s, %s available\n\n",
      FATHOM_VERSION, machine.processor.c_str(), machine.n_processors, machine.features.c_str(),
      ByteText(static_cast<double>(machine.total_bytes)).c_str(),
      ByteText(static_cast<double>(machine.available_bytes)).c_str());
  std::printf("backends\n");
  for (const BackendInfo& backend : ListBackends()) {
    const std::string refusal = backend.available ? "" : "; not here: " + backend.reason;
    std::printf("  %-17s %s%s\n", backend.name.c_str(), backend.description.c_str(),
                refusal.c_str());
  }
  std::printf("\n");
  std::printf("methods (name:key=value,...)\n");
  for (const MethodInfo& method : ListMethods()) {
    std::printf("  %-17s %s\n", method.name.c_str(), method.summary.c_str());
    if (!method.options.empty()) std::printf("  %-17s %s\n", "", method.options.c_str());
  }
}

int Info(const InfoOptions& options) {
  const MethodSpec method = MethodSpec::Parse(options.method);
  ValidateMethodSpec(method);
  std::vector<std::int64_t> contexts;
  for (const std::string& text : options.contexts) contexts.push_back(ParseTokens(text));
  std::shared_ptr<const Model> model;
  if (!options.model.empty()) model = Model::Open(options.model);
  if (model && contexts.empty()) {
    for (std::int64_t n = 4096; n < model->info().n_ctx_train; n *= 4) contexts.push_back(n);
    contexts.push_back(model->info().n_ctx_train);
  }
  if (!options.json) {
    PrintMachine();
    if (model) PrintModel(model->info());
    if (model) PrintMemory(model->info(), method, contexts);
    return kExitOk;
  }
  const MachineInfo machine = DescribeMachine();
  nlohmann::json json = {{"version", FATHOM_VERSION},
                         {"machine",
                          {{"processor", machine.processor},
                           {"n_processors", machine.n_processors},
                           {"features", machine.features},
                           {"total_bytes", machine.total_bytes},
                           {"available_bytes", machine.available_bytes}}},
                         {"backends", BackendsJson()},
                         {"methods", MethodsJson()}};
  if (model) {
    json["model"] = ModelJson(model->info());
    json["memory"] = MemoryJson(model->info(), method, contexts);
  }
  WriteOut(JsonText(json));
  return kExitOk;
}

}  // namespace

void AddInfoCommand(Command app, int* exit_code) {
  auto options = std::make_shared<InfoOptions>();
  Command info =
      app.AddCommand("info", "Describe the machine, the backends, the methods and a model");
  info.AddOption("-m,--model", options->model, "GGUF model");
  info.AddOption("-c,--ctx-size", options->contexts, "session lengths to size, e.g. 32k,128k")
      .SeparatedBy(',');
  info.AddOption("--method", options->method, "method spec whose index is sized").ShowDefault();
  info.AddFlag("--json", options->json, "print one JSON document");
  info.OnRun([options, exit_code] { *exit_code = Info(*options); });
}

}  // namespace fathom::cli
