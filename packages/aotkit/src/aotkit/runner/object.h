// Object code of a package in memory: sections placed, linked and made executable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace aotkit {

class Object {
 public:
  // `imports`: the only functions of this process that it may call. Throws Error.
  Object(std::string_view code, const std::vector<std::string> &imports);
  ~Object();
  Object(const Object &) = delete;
  Object &operator=(const Object &) = delete;

  void *function(const std::string &name) const;  // throws Error if there is none

 private:
  char *memory_ = nullptr;
  uint64_t size_ = 0;
  std::unordered_map<std::string, uint64_t> functions_;
};

}  // namespace aotkit
