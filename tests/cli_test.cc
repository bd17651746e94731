// SPDX-License-Identifier: MIT
// The command line as a user meets it: every kind of bad input gives one clear line and the right
// exit code, and a short document is answered. Runs the built program.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

using test::ProgramResult;
using test::Quoted;
using test::ReadAll;

const std::string kModelPath =
    std::string(FATHOM_SOURCE_DIR) + "/models/fathom-recall-15m-q8_0.gguf";
const std::string kModel = Quoted(kModelPath);
const std::string kQuestions = std::string(FATHOM_SOURCE_DIR) + "/models/questions/";

class Cli : public test::ProgramTest {};

TEST_F(Cli, UsageErrorsExitWithTwo) {
  ExpectError("", 2, {"subcommand"});
  ExpectError("walk", 2, {"walk", "valid: run"});
  ExpectError("run -p hello", 2, {"-m MODEL"});
  ExpectError("run -m " + kModel + " -p ''", 2, {"empty"});
  ExpectError("bench walk", 2, {"walk", "valid: decode"});
  ExpectError("run -m " + kModel, 2, {"-f FILE", "-p TEXT"});
  ExpectError("run -m " + kModel + " -p hi --colour", 2, {"--colour"});
  ExpectError("run -m " + kModel + " -p hi -n 0", 2, {"--predict"});
  ExpectError("run -m " + kModel + " -p hi -c 12z", 2, {"12z", "32k"});
  ExpectError("run -m " + kModel + " -p hi --method fathm", 2, {"fathm", "fathom"});
  ExpectError("run -m " + kModel + " -p hi --method fathom:k=36", 2, {"k=36", "37"});
  ExpectError("run -m " + kModel + " -p hi --method fathom:bits=9999", 2, {"bits=9999", "1.."});
  ExpectError("run -m " + kModel + " -p hi --method fathom:preset=paper,budget=0", 2, {"budget=0"});
  ExpectError("run -m " + kModel + " -p hi --method fathom:depth=3", 2, {"depth", "valid here"});
  ExpectError("run -m " + kModel + " -p hi --compare dense:k=3", 2, {"dense", "no option 'k'"});
  ExpectError("run -m " + kModel + " -p hi --backend gpu", 2, {"gpu", "cpu/avx2"});
  ExpectError("run -m " + kModel + " -f " + Write("empty.txt", "") + " -p hi", 2, {"empty"});
  ExpectError("run -m " + kModel + " -f " + Write("blank.txt", " \n\n") + " -p hi", 2, {"empty"});
}

TEST_F(Cli, FilesThatCannotBeReadExitWithOne) {
  ExpectError("run -m " + kModel + " -f nowhere.txt -p hi", 1, {"nowhere.txt", "No such file"});
  ExpectError("run -m nowhere.gguf -p hi", 1, {"nowhere.gguf", "No such file"});
  ExpectError("info -m nowhere.gguf", 1, {"nowhere.gguf"});
  ExpectError("run -m " + Write("text.gguf", "this is not a model") + " -p hi", 1, {"text.gguf"});
  ExpectError("run -m " + Write("none.gguf", "") + " -p hi", 1, {"none.gguf"});
  const std::string model = ReadAll(kModelPath);
  ASSERT_GT(model.size(), 1000000U);
  ExpectError("run -m " + Write("half.gguf", model.substr(0, model.size() / 2)) + " -p hi", 1,
              {"half.gguf", "truncated"});
  ExpectError("run -m " + Write("head.gguf", model.substr(0, 2000)) + " -p hi", 1, {"head.gguf"});
}

TEST_F(Cli, DocumentLongerThanTheContextSaysByHowMuch) {
  const ProgramResult result = Run("run -m " + kModel + " -f " +
                                   Quoted(kQuestions + "single-needle-4k.txt") + " -p hi -c 2k");
  EXPECT_EQ(result.code, 2);
  EXPECT_NE(result.err.find("more than the context of 2,048"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("use -c "), std::string::npos) << result.err;
}

TEST_F(Cli, SessionLargerThanMemorySaysHowMuchItNeeds) {
  const ProgramResult result = Run("run -m " + kModel + " -p hi -c 512M");
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.err.find("536870912 tokens needs"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("available"), std::string::npos) << result.err;
}

TEST_F(Cli, InfoDescribesMachineModelAndMemory) {
  const ProgramResult text = Run("info -m " + kModel + " -c 4k,32k");
  EXPECT_EQ(text.code, 0) << text.err;
  for (const char* part :
       {"cpu/avx512", "cpu/portable", "ref", "qwen3", "32,768 tokens", "fathom", "dense"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part;
  }
  const ProgramResult json = Run("info -m " + kModel + " -c 32k --json");
  ASSERT_EQ(json.code, 0);
  const auto parsed = nlohmann::json::parse(json.out);
  EXPECT_EQ(parsed["model"]["head_dim"], 128);
  EXPECT_EQ(parsed["model"]["qk_norm"], true);
  EXPECT_EQ(parsed["memory"][0]["rows_bytes"], 6 * 2 * 32768 * 2 * 128 * 2);
  // 64 bytes of planes, 1 of 4-bit means and 4 of the values' block means per token and KV head.
  EXPECT_EQ(parsed["memory"][0]["index_bytes"], 6 * 2 * 32768 * (64 + 1 + 4));
}

TEST_F(Cli, ForcedBackendsAnswerAlike) {
  const std::string document =
      Write("note.txt", "The locker number of the harbour library is 4820617.\n");
  std::string first;
  for (const char* backend : {"cpu/portable", "cpu/avx2", "cpu/avx512", "ref"}) {
    const ProgramResult result =
        Run("run -m " + kModel + " -f " + document +
            " -p 'What is the locker number of the harbour library?' --backend " + backend);
    if (result.code == 1 && result.err.find("cpu/") != std::string::npos) {
      continue;  // refused with a reason: this processor lacks it
    }
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_NE(result.out.find("4820617"), std::string::npos) << backend << ": " << result.out;
    if (first.empty()) first = result.out;
    EXPECT_EQ(result.out, first) << backend;
  }
  EXPECT_FALSE(first.empty());
}

TEST_F(Cli, InvalidUtf8InADocumentPassesThrough) {
  // A lone Latin-1 byte, impossible bytes, a cut-off character and a NUL.
  constexpr char kBytes[] = "caf\xe9 \xff\xfe\x80 \xe2\x82 the locker is 12.\0 end";
  const std::string document = Write("bytes.txt", std::string(kBytes, sizeof(kBytes) - 1));
  const ProgramResult result = Run("run -m " + kModel + " -f " + document + " -p 'What?' -n 4");
  EXPECT_EQ(result.code, 0) << result.err;
  const ProgramResult json =
      Run("run -m " + kModel + " -f " + document + " -p 'What?' -n 4 --json");
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_TRUE(nlohmann::json::accept(json.out)) << json.out;
}

TEST_F(Cli, DocumentFromStandardInput) {
  const std::string document =
      Write("note.txt", "The locker number of the harbour library is 4820617.\n");
  const std::string command = Quoted(FATHOM_PROGRAM) + " run -m " + kModel +
                              " -f - -p 'What is the locker number of the harbour library?' <" +
                              document + " 2>/dev/null";
  std::FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::array<char, 256> buffer{};
  std::string out;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) out += buffer.data();
  EXPECT_EQ(pclose(pipe), 0);
  EXPECT_NE(out.find("4820617"), std::string::npos) << out;
}

TEST_F(Cli, PlainContinuationWithoutChat) {
  const std::string document = Write(
      "note.txt", "The access code of the north tower is 8306194.\n\nThe weather was fine.\n");
  const ProgramResult result = Run("run -m " + kModel + " -f " + document +
                                   " -p 'The access code of the north tower is' --no-chat -n 8");
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.out.find("8306194"), std::string::npos) << result.out;
}

TEST_F(Cli, HandMadeChatFormatEqualsTheTemplate) {
  // Control tokens of a prompt work without the template; those of a document stay text.
  const std::string document =
      Write("note.txt", "The locker of the library is 4820617.<|im_end|>\n");
  const std::string question = "What is the locker number of the library?";
  const std::string made = "'<|im_start|>user\nThe locker of the library is 4820617.\n\n" +
                           question + "<|im_end|>\n<|im_start|>assistant\n'";
  const ProgramResult plain = Run("run -m " + kModel + " --no-chat -n 16 -p " + made);
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_EQ(plain.out, "4820617\n");
  const ProgramResult chat =
      Run("run -m " + kModel + " -n 16 -f " + document + " -p '" + question + "'");
  EXPECT_NE(chat.out.find("4820617"), std::string::npos) << chat.out;
}

TEST_F(Cli, OutputThatCannotBeWrittenIsAFailure) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  for (const std::string& arguments :
       {"run -m " + kModel + " -p hello -n 4", "run -m " + kModel + " -p hello -n 4 --json",
        std::string("info")}) {
    const std::string command =
        Quoted(FATHOM_PROGRAM) + " " + arguments + " >/dev/full 2>" + (folder_ / "err").string();
    const int status = std::system(command.c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1) << arguments;
    EXPECT_NE(ReadAll(folder_ / "err").find("cannot write to standard output"), std::string::npos)
        << arguments;
  }
}

TEST_F(Cli, CaptureWritesAndReportsIt) {
  const std::string text = Quoted(kQuestions + "single-needle-4k.txt");
  const fs::path file = folder_ / "my capture.safetensors";
  const std::string arguments = "capture -m " + kModel + " -f " + text + " -c 300 --positions 32" +
                                " --stats-every 7 --layers 0,3-5 -o " + Quoted(file.string());
  const ProgramResult json = Run(arguments + " --json");
  ASSERT_EQ(json.code, 0) << json.err;
  const auto parsed = nlohmann::json::parse(json.out);
  EXPECT_EQ(parsed["bytes"], fs::file_size(file));
  EXPECT_EQ(parsed["n_tokens"], 300);
  EXPECT_EQ(parsed["layers"], (std::vector<int>{0, 3, 4, 5}));
  EXPECT_EQ(parsed["positions"], 32);
  EXPECT_EQ(parsed["stats_positions"], 36);  // 16, 23, ..., 261 < 268
  EXPECT_EQ(parsed["dtype"], "bf16");
  EXPECT_EQ(parsed["text"], "single-needle-4k.txt");
  // Headers aside: 4 layers of 8 query heads and 2 KV heads of 128 channels, and positions.
  const auto header = fs::file_size(file) - 4 * (2 * 128 * (8 * 68 + 2 * 300 * 2) + 8 * 68);
  EXPECT_GT(header, 1000U);
  EXPECT_LT(header, 4000U);
  ExpectError(arguments, 2, {"my capture.safetensors exists", "--force"});
  const ProgramResult forced = Run(arguments + " --force --dtype f32");
  EXPECT_EQ(forced.code, 0) << forced.err;
  for (const char* part : {"300 of single-needle-4k.txt", "0,3-5 (4)", "f32: as asked"}) {
    EXPECT_NE(forced.out.find(part), std::string::npos) << part << " in " << forced.out;
  }
  EXPECT_EQ(fs::file_size(file) - header, 4 * (4 * 128 * (8 * 68 + 2 * 300 * 2) + 8 * 68));
  EXPECT_FALSE(fs::exists(file.string() + ".partial"));
}

TEST_F(Cli, CaptureRefusesBadRequests) {
  const std::string out = " -o " + Quoted((folder_ / "c.safetensors").string());
  const std::string start =
      "capture -m " + kModel + " -f " + Quoted(kQuestions + "single-needle-4k.txt") + out;
  ExpectError("capture -m " + kModel, 2, {"--file"});
  ExpectError(start, 2, {"--ctx-size"});
  ExpectError(start + " -c 8k", 2, {"single-needle-4k.txt", "tokens, fewer than the 8,192"});
  ExpectError(start + " -c 100", 2, {"100 tokens", "144"});
  ExpectError(start + " -c 300 --layers 3-1", 2, {"--layers '3-1'"});
  ExpectError(start + " -c 300 --layers 0,,1", 2, {"--layers '0,,1'"});
  ExpectError(start + " -c 300 --layers 9", 2, {"layer 9", "layers 0 to 5"});
  ExpectError(start + " -c 300 --dtype f64", 2, {"f64"});
  ExpectError(start + " -c 300 --positions 0", 2, {"--positions"});
  ExpectError("capture -m " + kModel + " -f nowhere.txt -c 300" + out, 1, {"nowhere.txt"});
  ExpectError("capture -m " + kModel + " -f " + Quoted(kQuestions + "single-needle-4k.txt") +
                  " -c 300 -o " + Quoted((folder_ / "no/c.safetensors").string()),
              1, {"no/c.safetensors.partial", "No such file"});
  EXPECT_FALSE(fs::exists(folder_ / "c.safetensors"));
}

TEST_F(Cli, SeededSamplingRepeats) {
  const std::string arguments =
      "run -m " + kModel + " -p 'Tell me something.' -n 24 --temp 1.5 --seed ";
  const ProgramResult a = Run(arguments + "7");
  const ProgramResult b = Run(arguments + "7");
  const ProgramResult c = Run(arguments + "8");
  EXPECT_EQ(a.out, b.out);
  EXPECT_NE(a.out, c.out);
}

TEST_F(Cli, InterruptKeepsWhatWasProducedAndExitsWith130) {
  const std::string out = (folder_ / "out").string();
  const std::string err = (folder_ / "err").string();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (std::freopen(out.c_str(), "w", stdout) == nullptr ||
        std::freopen(err.c_str(), "w", stderr) == nullptr)
      _exit(99);
    // Sampling hot keeps the model talking for as long as it may.
    execl(FATHOM_PROGRAM, FATHOM_PROGRAM, "run", "-m", kModelPath.c_str(), "-p", "Once upon a time",
          "--no-chat", "-n", "60000", "-c", "64k", "--temp", "3", "--top-k", "0", "--top-p", "1",
          "--seed", "1", static_cast<char*>(nullptr));
    _exit(99);
  }
  // Wait for output rather than for time.
  for (int i = 0; i < 600 && ReadAll(out).size() < 20; ++i) usleep(100000);
  ASSERT_GE(ReadAll(out).size(), 20U);
  kill(child, SIGINT);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130) << ReadAll(err);
  const std::string text = ReadAll(out);
  EXPECT_EQ(text.back(), '\n');
}

}  // namespace
}  // namespace fathom
