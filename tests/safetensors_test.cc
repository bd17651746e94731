// SPDX-License-Identifier: MIT
// The safetensors reader against files that are damaged in every way we could think of, and the
// writer against the reader.
#include "memory/safetensors.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "support/random_data.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

// Length, header and data as they are.
std::string File(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
         "],\"data_offsets\":[" + offsets + "]}";
}

class Safetensors : public testing::Test {
 protected:
  std::string Path(const std::string& name = "t.safetensors") const {
    return (dir_.path() / name).string();
  }

  SafetensorsFile Read(const std::string& bytes) const {
    dir_.Write("t.safetensors", bytes);
    return {Path(), "test file"};
  }

  // Reading the bytes fails as corrupt, with one line that names the file and all parts.
  void ExpectCorrupt(const std::string& bytes, const std::vector<std::string>& parts) const {
    try {
      Read(bytes);
      ADD_FAILURE() << "no error where it should say " << parts.front();
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << message;
      EXPECT_NE(message.find(Path()), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      for (const std::string& part : parts) {
        EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
      }
    }
  }

  static ErrorCode Code(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      return error.code();
    }
    ADD_FAILURE() << "no error";
    return ErrorCode::kInternal;
  }

  test::TempDir dir_;
};

TEST_F(Safetensors, ReadsWhatIsRight) {
  // An odd header length: nothing in the data is aligned.
  std::string data(8 + 4 + 16, '\0');
  const std::array<float, 2> f32 = {1.5F, -2.0F};
  const std::array<std::uint16_t, 2> bf16 = {0x3FC0, 0xC000};
  const std::array<std::int64_t, 2> i64 = {-5, std::int64_t{1} << 40};
  std::memcpy(data.data(), f32.data(), 8);
  std::memcpy(data.data() + 8, bf16.data(), 4);
  std::memcpy(data.data() + 12, i64.data(), 16);
  std::string header = "{\"__metadata__\":{\"a\":\"b\"}," + Entry("f", "F32", "2,1", "0,8") + "," +
                       Entry("b", "BF16", "2", "8,12") + "," + Entry("i", "I64", "2", "12,28") +
                       "," + Entry("none", "U8", "0,7", "28,28") + "}";
  if (header.size() % 2 == 0) header += " ";
  const SafetensorsFile file = Read(File(header, data));
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"a", "b"}}));
  ASSERT_EQ(file.tensors().size(), 4U);
  EXPECT_EQ(file.Find("x"), nullptr);
  ASSERT_NE(file.Find("f"), nullptr);
  EXPECT_EQ(file.Find("f")->shape, (std::vector<std::int64_t>{2, 1}));
  std::array<float, 2> out{};
  file.ReadFloats(*file.Find("f"), 0, 2, out.data());
  EXPECT_EQ(out, f32);
  out = {};
  file.ReadFloats(*file.Find("b"), 0, 2, out.data());
  EXPECT_EQ(out, f32);
  file.ReadFloats(*file.Find("b"), 1, 1, out.data());
  EXPECT_EQ(out[0], -2.0F);
  EXPECT_EQ(file.ReadIntegers(*file.Find("i")), (std::vector<std::int64_t>{i64[0], i64[1]}));
  EXPECT_EQ(Code([&] { file.ReadFloats(*file.Find("i"), 0, 1, out.data()); }), ErrorCode::kCorrupt);
  EXPECT_EQ(Code([&] { file.ReadIntegers(*file.Find("f")); }), ErrorCode::kCorrupt);
}

TEST_F(Safetensors, DamagedHeadersAreRefused) {
  ExpectCorrupt("", {"0 bytes"});
  ExpectCorrupt("1234567", {"7 bytes"});
  ExpectCorrupt(std::string(8, '\0'), {"does not start with {"});
  ExpectCorrupt(std::string(8, '\xFF') + "{}", {"header of 18446744073709551615", "at most 2"});
  ExpectCorrupt(File("{}", "").substr(0, 9), {"header of 2 bytes", "at most 1"});
  ExpectCorrupt(File(" {}", ""), {"does not start with {"});
  ExpectCorrupt(File("{\"a\":", ""), {"JSON at byte"});
  ExpectCorrupt(File("{} x", ""), {"JSON at byte"});
  ExpectCorrupt(File("{\"a\xFF\":1}", ""), {"JSON at byte"});
  ExpectCorrupt(File("{\"a\":1}", ""), {"'a'", "no description"});
  ExpectCorrupt(File("{\"a\\nb\":1}", ""), {"'a?b'"});
  ExpectCorrupt(File("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", ""), {"'a'", "data_offsets"});
  ExpectCorrupt(File("{\"__metadata__\":[]}", ""), {"__metadata__"});
  ExpectCorrupt(File("{\"__metadata__\":{\"x\":1}}", ""), {"__metadata__", "'x'"});
  std::string deep = "{\"a\":";
  deep.append(100000, '[').append(100000, ']').append("}");
  ExpectCorrupt(File(deep, ""), {"table of tensors"});
}

TEST_F(Safetensors, NamesAndKeysStandOnce) {
  const std::string a = Entry("a", "F32", "1", "0,4");
  ExpectCorrupt(File("{" + a + "," + Entry("a", "F32", "1", "4,8") + "}", std::string(8, '\0')),
                {"'a' twice"});
  ExpectCorrupt(
      File(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "1234"),
      {"'dtype' twice"});
}

TEST_F(Safetensors, TypesAndShapesAreChecked) {
  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
    return File("{" + Entry("a", dtype, shape, offsets) + "}", "1234");
  };
  ExpectCorrupt(one("F33", "1", "0,4"), {"'a'", "'F33'"});
  ExpectCorrupt(one("F32", "-1", "0,4"), {"'a'", "dimension"});
  ExpectCorrupt(one("F32", "1.0", "0,4"), {"'a'", "dimension"});
  ExpectCorrupt(one("F32", "4294967296,4294967296", "0,4"), {"'a'", "dimension"});
  ExpectCorrupt(one("F32", "18446744073709551615", "0,4"), {"'a'", "dimension"});
  ExpectCorrupt(one("F32", "1,1,1,1,1,1,1,1,1", "0,4"), {"'a'", "8 dimensions"});
  ExpectCorrupt(one("F32", "2", "0,4"), {"'a'", "has 4 bytes", "[2] of F32 needs 8"});
  ExpectCorrupt(one("F16", "1", "0,4"), {"'a'", "needs 2"});
  ExpectCorrupt(one("F32", "1", "4,0"), {"'a'", "no range"});
  ExpectCorrupt(one("F32", "1", "0"), {"'a'", "no range"});
  ExpectCorrupt(one("F32", "1", "-4,0"), {"'a'", "no range"});
}

TEST_F(Safetensors, ExtentsCoverTheFileOnce) {
  const auto two = [](const std::string& first, const std::string& second, std::size_t bytes) {
    return File("{" + Entry("a", "F32", "2", first) + "," + Entry("b", "F32", "1", second) + "}",
                std::string(bytes, '\0'));
  };
  EXPECT_EQ(Read(two("0,8", "8,12", 12)).tensors().size(), 2U);
  EXPECT_EQ(Read(two("4,12", "0,4", 12)).tensors().size(), 2U);
  ExpectCorrupt(two("0,8", "8,12", 11), {"truncated", "'b'", "byte 12", "has 11"});
  ExpectCorrupt(two("0,8", "8,12", 13), {"end at byte 12", "has 13"});
  ExpectCorrupt(two("0,8", "4,8", 8), {"'b'", "overlap"});
  ExpectCorrupt(two("0,8", "12,16", 16), {"'b'", "gap"});
  ExpectCorrupt(two("4,12", "12,16", 16), {"'a'", "gap"});
  ExpectCorrupt(File("{}", "1"), {"end at byte 0", "has 1"});
}

TEST_F(Safetensors, NoDamageDoesAnythingButThrow) {
  const std::string whole =
      File("{\"__metadata__\":{\"a\":\"b\"}," + Entry("a", "F32", "1", "0,4") + "," +
               Entry("b", "F16", "2", "4,8") + "}",
           std::string(8, '\0'));
  EXPECT_EQ(Read(whole).tensors().size(), 2U);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_EQ(Code([&] { Read(whole.substr(0, n)); }), ErrorCode::kCorrupt) << n;
  }
  int refused = 0;
  for (std::size_t at = 0; at + 8 < whole.size(); ++at) {
    for (const char c : {'\0', '\xFF', '"', '{', '}', '[', ']', ',', '0', '9', '-', 'e'}) {
      std::string damaged = whole;
      damaged[at] = c;
      try {
        const SafetensorsFile file = Read(damaged);
        std::array<float, 2> out{};
        for (const SafetensorsTensor& tensor : file.tensors()) {
          if (tensor.type == TensorType::kF32 || tensor.type == TensorType::kF16) {
            ASSERT_LE(tensor.elements, 2);
            file.ReadFloats(tensor, 0, tensor.elements, out.data());
          }
        }
      } catch (const Error& error) {
        ++refused;
        EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
      }
    }
  }
  EXPECT_GT(refused, 500);
}

TEST_F(Safetensors, UnreadableFilesAreIoErrors) {
  EXPECT_EQ(Code([&] { SafetensorsFile(Path("none"), "test file"); }), ErrorCode::kIo);
  EXPECT_EQ(Code([&] { SafetensorsFile(dir_.string(), "test file"); }), ErrorCode::kIo);
}

TEST_F(Safetensors, Bf16RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0F), 0x3F80);
  EXPECT_EQ(FloatToBf16(-0.0F), 0x8000);
  EXPECT_EQ(FloatToBf16(0x1.01p0F), 0x3F80);      // halfway, to even below
  EXPECT_EQ(FloatToBf16(0x1.03p0F), 0x3F82);      // halfway, to even above
  EXPECT_EQ(FloatToBf16(0x1.010002p0F), 0x3F81);  // a little more than halfway
  EXPECT_EQ(FloatToBf16(0x1.FEp127F), 0x7F7F);    // the largest
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(FloatToBf16(-std::numeric_limits<float>::infinity()), 0xFF80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::numeric_limits<float>::signaling_NaN()))));
  for (std::uint32_t b = 0; b < 0x10000; ++b) {
    const float f = Bf16ToFloat(static_cast<std::uint16_t>(b));
    if (!std::isnan(f)) {
      ASSERT_EQ(FloatToBf16(f), b);
    }
  }
}

TEST_F(Safetensors, RoundTripInPieces) {
  const std::vector<float> values = test::RandomNormal(3 * 5000, 7);
  const std::vector<std::int64_t> integers = {3, -1, std::int64_t{1} << 60};
  {
    SafetensorsWriter writer(Path(),
                             {{"half", TensorType::kF16, {3, 5000}},
                              {"wide", TensorType::kF32, {3, 5000}},
                              {"brain", TensorType::kBf16, {5000, 3}},
                              {"count", TensorType::kI64, {3}}},
                             {{"key", "caf\xE9 \"quoted\""}});
    for (std::size_t tensor = 0; tensor < 3; ++tensor) {
      // Backwards, in pieces that no block size divides.
      for (std::int64_t at = 15000; at > 0;) {
        const std::int64_t n = std::min<std::int64_t>(at, 4999);
        at -= n;
        writer.WriteFloats(
            tensor, at,
            std::span(values).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(n)));
      }
    }
    writer.WriteIntegers(3, 0, integers);
    EXPECT_FALSE(fs::exists(Path()));
    writer.Commit();
    EXPECT_EQ(static_cast<std::int64_t>(fs::file_size(Path())), writer.file_bytes());
  }
  EXPECT_FALSE(fs::exists(Path() + ".partial"));
  const SafetensorsFile file(Path(), "test file");
  EXPECT_EQ(file.metadata().at("key"), "caf\xEF\xBF\xBD \"quoted\"");
  for (const SafetensorsTensor& tensor : file.tensors()) {
    const auto at = reinterpret_cast<std::uintptr_t>(tensor.data);
    EXPECT_EQ(at % static_cast<std::uintptr_t>(TensorElementBytes(tensor.type)), 0U);
    if (tensor.type == TensorType::kI64) {
      EXPECT_EQ(file.ReadIntegers(tensor), integers);
      continue;
    }
    std::vector<float> out(values.size());
    file.ReadFloats(tensor, 0, 10000, out.data());
    file.ReadFloats(tensor, 10000, 5000, out.data() + 10000);
    for (std::size_t i = 0; i < out.size(); ++i) {
      float expected = values[i];
      if (tensor.type == TensorType::kF16) expected = HalfToFloat(FloatToHalf(expected));
      if (tensor.type == TensorType::kBf16) expected = Bf16ToFloat(FloatToBf16(expected));
      ASSERT_EQ(out[i], expected) << tensor.name << " " << i;
    }
  }
}

TEST_F(Safetensors, WithoutCommitNothingStays) {
  dir_.Write("t.safetensors", "what was there before");
  {
    SafetensorsWriter writer(Path(), {{"a", TensorType::kF32, {4}}}, {});
    EXPECT_TRUE(fs::exists(Path() + ".partial"));
    writer.WriteFloats(0, 0, std::vector<float>(3));
    EXPECT_EQ(Code([&] { writer.Commit(); }), ErrorCode::kInternal);  // one element is missing
  }
  EXPECT_FALSE(fs::exists(Path() + ".partial"));
  EXPECT_EQ(fs::file_size(Path()), 21U);
}

TEST_F(Safetensors, LeftOverPartialFilesAreReplacedButNotThoseInUse) {
  dir_.Write("t.safetensors.partial", std::string(1000, 'x'));
  SafetensorsWriter writer(Path(), {{"a", TensorType::kF32, {1}}}, {});
  EXPECT_EQ(Code([&] {
              SafetensorsWriter(Path(), {{"a", TensorType::kF32, {1}}}, {});
            }),
            ErrorCode::kIo);
  writer.WriteFloats(0, 0, std::vector<float>{4});
  writer.Commit();
  const SafetensorsFile file(Path(), "test file");
  float out = 0;
  file.ReadFloats(*file.Find("a"), 0, 1, &out);
  EXPECT_EQ(out, 4.0F);
}

TEST_F(Safetensors, WriterRefusesWhatCannotBeWritten) {
  const auto make = [&](const std::string& path, std::vector<std::int64_t> shape) {
    SafetensorsWriter(path, {{"a", TensorType::kF32, std::move(shape)}}, {});
  };
  EXPECT_EQ(Code([&] { make(Path("no/folder"), {1}); }), ErrorCode::kIo);
  EXPECT_EQ(Code([&] { make(dir_.string(), {1}); }), ErrorCode::kIo);
  EXPECT_EQ(Code([&] { make(Path(), {-1}); }), ErrorCode::kUsage);
  EXPECT_EQ(Code([&] {
              make(Path(), {std::int64_t{1} << 40, std::int64_t{1} << 40});
            }),
            ErrorCode::kUsage);
  EXPECT_EQ(
      Code([&] {
        SafetensorsWriter(Path(), {{"a", TensorType::kF32, {1}}, {"a", TensorType::kF32, {1}}}, {});
      }),
      ErrorCode::kUsage);
  try {
    make(Path(), {std::int64_t{1} << 50});
    ADD_FAILURE() << "a file of 4 PiB found room";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_NE(std::string(error.what()).find("needs 4294967296.0 MiB"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(fs::is_empty(dir_.path()));
  SafetensorsWriter writer(Path(), {{"a", TensorType::kF32, {4}}, {"b", TensorType::kI64, {1}}},
                           {});
  const std::vector<float> values(3);
  EXPECT_EQ(Code([&] { writer.WriteFloats(0, 2, values); }), ErrorCode::kInternal);
  EXPECT_EQ(Code([&] { writer.WriteFloats(0, -1, values); }), ErrorCode::kInternal);
  EXPECT_EQ(Code([&] { writer.WriteFloats(1, 0, std::span(values).first(1)); }),
            ErrorCode::kInternal);
}

}  // namespace
}  // namespace fathom
