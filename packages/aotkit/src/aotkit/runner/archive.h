// The file of a package, mapped: a zip archive without compression (Note [Package file] of aotkit's package_file.py).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace aotkit {

class Archive {
 public:
  explicit Archive(const std::string &path);  // throws Error
  ~Archive();
  Archive(const Archive &) = delete;
  Archive &operator=(const Archive &) = delete;

  void check_signature(const std::string &key) const;  // throws Error unless the file was signed with this text
  bool has(std::string_view name) const;
  std::string_view read(std::string_view name) const;  // of a member whose checksum holds
  char *writable(std::string_view part) const;         // private memory: writing changes no file

 private:
  struct Member {
    std::string name;
    uint64_t size;
    uint64_t header;
    uint32_t checksum;
  };
  const Member &find(std::string_view name) const;
  std::string_view content(const Member &member) const;
  void read_directory();
  uint64_t number(uint64_t at, int bytes) const;

  char *data_ = nullptr;
  uint64_t size_ = 0;
  std::vector<Member> members_;
};

}  // namespace aotkit
