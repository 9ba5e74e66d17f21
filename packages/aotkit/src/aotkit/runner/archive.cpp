#include "archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "errors.h"
#include "sha256.h"

namespace aotkit {
namespace {

constexpr uint64_t END_SIZE = 22, LOCATOR_SIZE = 20, ENTRY_SIZE = 46, LOCAL_SIZE = 30;
constexpr uint32_t END_MARK = 0x06054b50, LOCATOR_MARK = 0x07064b50, WIDE_END_MARK = 0x06064b50;
constexpr uint32_t ENTRY_MARK = 0x02014b50, LOCAL_MARK = 0x04034b50;

uint32_t crc32(std::string_view data) {  // eight bytes at a time: weights are large
  using Table = std::array<uint32_t, 256>;
  static const std::array<Table, 8> tables = [] {
    std::array<Table, 8> made{};
    for (uint32_t n = 0; n < 256; ++n) {
      uint32_t c = n;
      for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
      made[0][n] = c;
    }
    for (size_t t = 1; t < 8; ++t)
      for (uint32_t n = 0; n < 256; ++n) made[t][n] = made[t - 1][n] >> 8 ^ made[0][made[t - 1][n] & 0xFF];
    return made;
  }();
  uint32_t c = 0xFFFFFFFFu;
  for (; data.size() >= 8; data.remove_prefix(8)) {
    uint64_t eight = 0;
    std::memcpy(&eight, data.data(), 8);
    eight ^= c;
    c = 0;
    for (size_t k = 0; k < 8; ++k) c ^= tables[7 - k][eight >> (8 * k) & 0xFF];
  }
  for (unsigned char byte : data) c = tables[0][(c ^ byte) & 0xFF] ^ c >> 8;
  return c ^ 0xFFFFFFFFu;
}

}  // namespace

Archive::Archive(const std::string &path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) bad_file("can't read the package " + path + ": " + std::strerror(errno));
  struct stat status {};
  if (fstat(file, &status) == 0 && status.st_size > 0) {
    size_ = static_cast<uint64_t>(status.st_size);
    void *mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    data_ = mapped == MAP_FAILED ? nullptr : static_cast<char *>(mapped);
  }
  close(file);
  if (data_ == nullptr) bad_file(path + " is no package of aotkit: it can't be mapped");
  try {
    read_directory();
  } catch (...) {
    munmap(data_, size_);
    throw;
  }
}

Archive::~Archive() { munmap(data_, size_); }

uint64_t Archive::number(uint64_t at, int bytes) const {
  if (at > size_ || size_ - at < static_cast<uint64_t>(bytes)) bad_file("the file is cut short, or no package of aotkit");
  uint64_t value = 0;
  std::memcpy(&value, data_ + at, static_cast<size_t>(bytes));  // little endian, as the processor is
  return value;
}

void Archive::read_directory() {
  uint64_t end = size_ < END_SIZE ? 0 : size_ - END_SIZE;
  const uint64_t first = end > 0xFFFF ? end - 0xFFFF : 0;
  while (number(end, 4) != END_MARK) {
    if (end == first) bad_file("the file is no package of aotkit, or is damaged: it has no directory");
    --end;
  }
  uint64_t count = number(end + 10, 2), at = number(end + 16, 4);
  if (at == 0xFFFFFFFF || count == 0xFFFF) {
    if (end < LOCATOR_SIZE || number(end - LOCATOR_SIZE, 4) != LOCATOR_MARK) bad_file("the file's directory is damaged");
    const uint64_t wide = number(end - LOCATOR_SIZE + 8, 8);
    if (number(wide, 4) != WIDE_END_MARK) bad_file("the file's directory is damaged");
    count = number(wide + 32, 8), at = number(wide + 48, 8);
  }
  for (uint64_t k = 0; k < count; ++k) {
    if (number(at, 4) != ENTRY_MARK) bad_file("the file's directory is damaged");
    const uint64_t name = number(at + 28, 2), extra = number(at + 30, 2), comment = number(at + 32, 2);
    Member member{"", number(at + 24, 4), number(at + 42, 4), static_cast<uint32_t>(number(at + 16, 4))};
    const bool compressed = number(at + 10, 2) != 0 || number(at + 20, 4) != number(at + 24, 4);
    if (compressed) bad_file("the file is no package of aotkit: its members are compressed");
    number(at + ENTRY_SIZE + name + extra + comment, 0);
    member.name.assign(data_ + at + ENTRY_SIZE, name);
    uint64_t place = at + ENTRY_SIZE + name;
    const uint64_t stop = place + extra;
    while (place + 4 <= stop) {  // sizes beyond 32 bits
      const uint64_t kind = number(place, 2), length = number(place + 2, 2);
      uint64_t value = place + 4;
      if (kind == 1) {
        if (member.size == 0xFFFFFFFF) member.size = number(value, 8), value += 16;
        if (member.header == 0xFFFFFFFF) member.header = number(value, 8);
      }
      place += 4 + length;
    }
    at = stop + comment;
    members_.push_back(std::move(member));
  }
}

const Archive::Member &Archive::find(std::string_view name) const {
  const Member *found = nullptr;
  for (const Member &member : members_) {
    if (member.name != name) continue;
    if (found != nullptr) bad_file("the file holds " + std::string(name) + " twice, so it is no package of aotkit");
    found = &member;
  }
  if (found == nullptr) bad_file("the file is no package of aotkit: it lacks " + std::string(name));
  return *found;
}

std::string_view Archive::content(const Member &member) const {
  if (number(member.header, 4) != LOCAL_MARK) bad_file("the file is damaged at " + member.name);
  const uint64_t begin = member.header + LOCAL_SIZE + number(member.header + 26, 2) + number(member.header + 28, 2);
  if (begin > size_ || size_ - begin < member.size) bad_file("the file is cut short: " + member.name + " lies behind its end");
  return {data_ + begin, member.size};
}

bool Archive::has(std::string_view name) const {
  for (const Member &member : members_)
    if (member.name == name) return true;
  return false;
}

std::string_view Archive::read(std::string_view name) const {
  const Member &member = find(name);
  const std::string_view data = content(member);
  if (crc32(data) != member.checksum) bad_file("the file is damaged: the checksum of " + member.name + " differs");
  return data;
}

char *Archive::writable(std::string_view part) const { return data_ + (part.data() - data_); }

void Archive::check_signature(const std::string &key) const {
  const char *blank = " \t\n\r\f\v";
  const size_t first = key.find_first_not_of(blank);
  const std::string text = first == std::string::npos ? "" : key.substr(first, key.find_last_not_of(blank) - first + 1);
  if (text.size() < 16) bad_file("this is no signing key: it needs at least 16 characters");
  Hmac signer(sha256(std::string("aotkit-cache shared key\0", 24) + text));
  for (const Member &member : members_) {
    if (member.name == "signature") continue;
    signer.update(member.name + '\0' + std::to_string(member.size) + '\0');
    signer.update(content(member));
  }
  const std::string wanted = signer.digest();
  const std::string_view signed_with = has("signature") ? content(find("signature")) : std::string_view();
  unsigned char differs = signed_with.size() != wanted.size();
  for (size_t k = 0; k < wanted.size() && k < signed_with.size(); ++k)  // as long for every signature
    differs |= static_cast<unsigned char>(wanted[k] ^ signed_with[k]);
  if (differs) bad_file("the file was not signed with this key, or was changed since");
}

}  // namespace aotkit
