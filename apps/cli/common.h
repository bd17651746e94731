// SPDX-License-Identifier: MIT
// What the commands share: exit codes, interruption, reading files.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "command_line.h"
#include "fathom/fathom.h"

namespace fathom::cli {

constexpr int kExitOk = 0;
constexpr int kExitFailure = 1;        // the work failed
constexpr int kExitUsage = 2;          // the request was wrong
constexpr int kExitInterrupted = 130;  // Ctrl-C, as shells report it

// Ctrl-C asks the running command to end cleanly; a second one ends the process at once.
void CatchInterrupt();
bool Interrupted();

// Whole file, "-" for standard input. Throws Error(kIo) naming the file and the reason.
std::string ReadText(const std::string& path);

// Replaces the file's content. Throws Error(kIo) naming the file and the reason.
void WriteText(const std::string& path, std::string_view text);
// Throws the same if WriteText would for lack of a folder or permission, to find out before the
// work rather than after it. Leaves an existing file as it is; makes an empty one otherwise.
void CheckWritable(const std::string& path);

// Writes to standard output at once. Throws Error(kIo) when it cannot: a full disk must not look
// like success.
void WriteOut(std::string_view text);

// The document with two spaces of indentation, and a newline. Answers, paths and names need not be
// UTF-8, JSON must be: bytes that are none are replaced.
std::string JsonText(const nlohmann::json& json);

// Seconds of a clock that never goes back.
double Now();

// "4096", "32k" (1,024 times) or "1M". Throws Error(kUsage).
std::int64_t ParseTokens(const std::string& text);

// "0,3-5" as 0, 3, 4, 5; nothing of an empty text. Throws Error(kUsage).
std::vector<std::int32_t> ParseLayers(const std::string& text);

// "31,604".
std::string Grouped(std::int64_t number);
// "12.3 MiB".
std::string ByteText(double bytes);

// "end", "length", "context" or "interrupted".
std::string StopName(StopReason stop);

int ExitCode(ErrorCode code);

// "0,3-5" of ascending layers; the reverse of ParseLayers.
std::string LayersText(const std::vector<std::int32_t>& layers);

// The statistics file of --stats-file, null for an empty path. Throws as Calibration::Open.
std::shared_ptr<const Calibration> LoadStatistics(const std::string& path);
inline constexpr const char* kStatsFileHelp =
    "statistics of a file (see fathom calibrate) instead of the prefill's own";

// A number without trailing zeros: "100", "0.5".
std::string Plain(double number);

// -t,--threads and --backend, the same in every command that computes.
void AddMachineOptions(Command command, int* threads, std::string* backend);

// --device and --decode-attention, where a session runs.
void AddDeviceOptions(Command command, std::string* device, std::string* decode_attention);

// Each adds its subcommand; the callback stores the exit code.
void AddRunCommand(Command app, int* exit_code);
void AddInfoCommand(Command app, int* exit_code);
void AddBenchCommand(Command app, int* exit_code);
void AddCaptureCommand(Command app, int* exit_code);
void AddCalibrateCommand(Command app, int* exit_code);
void AddEvalCommand(Command app, int* exit_code);
void AddSessionCommand(Command app, int* exit_code);

}  // namespace fathom::cli
