// What goes wrong, with the status that the C interface gives.
#pragma once

#include <stdexcept>
#include <string>

#include "aotkit_runner.h"

namespace aotkit {

struct Error : std::runtime_error {
  Error(aotkit_status status, const std::string &message) : std::runtime_error(message), status(status) {}
  aotkit_status status;
};

[[noreturn]] inline void bad_file(const std::string &message) { throw Error(AOTKIT_BAD_FILE, message); }
[[noreturn]] inline void unsupported(const std::string &message) { throw Error(AOTKIT_UNSUPPORTED, message); }

}  // namespace aotkit
