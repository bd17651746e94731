// SPDX-License-Identifier: MIT
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "fathom/error.h"

namespace fathom::test {

// What the Error of fn() says. A failure where there is none, or of another code.
template <typename Fn>
std::string ErrorOf(ErrorCode code, const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace fathom::test
