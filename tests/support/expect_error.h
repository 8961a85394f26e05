// Demands a cram::Error with an exit code and certain words in its message.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "base/check.h"

namespace cram::test {

/// Runs `action`; a test failure unless it throws Error(code) whose message holds every one of `words`.
inline void expect_error(ExitCode code, std::initializer_list<std::string> words, const std::function<void()>& action,
                         const std::string& what = "") {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << what << ": " << error.what();
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << what << ": \"" << word << "\" is missing in: " << error.what();
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << what << ": another exception than cram::Error: " << error.what();
    return;
  }
  ADD_FAILURE() << what << ": no error, expected exit code " << static_cast<int>(code);
}

}  // namespace cram::test
