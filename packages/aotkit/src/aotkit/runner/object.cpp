#include "object.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "errors.h"

namespace aotkit {
namespace {

constexpr uint64_t STUB = 16;  // jmp *2(%rip), then the address that it reads; also what a table of addresses holds

[[noreturn]] void damaged(const std::string &what) { bad_file("the package's object code does not load: " + what); }

uint64_t aligned(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// Tables of the file, every access within its bounds.
class Elf {
 public:
  explicit Elf(std::string_view code) : code_(code) {
    const Elf64_Ehdr &head = *at<Elf64_Ehdr>(0, 1);
    if (std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_type != ET_REL)
      damaged("it is no relocatable ELF file");
    if (head.e_machine != EM_X86_64) unsupported("the package's code is for a processor that is no x86-64");
    sections_ = at<Elf64_Shdr>(head.e_shoff, head.e_shnum);
    count_ = head.e_shnum;
  }

  size_t count() const { return count_; }
  const Elf64_Shdr &section(size_t k) const {
    if (k >= count_) damaged("a section is missing");
    return sections_[k];
  }
  template <typename T>
  const T *at(uint64_t offset, uint64_t count) const {
    if (offset > code_.size() || (code_.size() - offset) / sizeof(T) < count || offset % alignof(T))
      damaged("a table lies behind its end");
    return reinterpret_cast<const T *>(code_.data() + offset);
  }
  std::string name(const Elf64_Shdr &strings, uint64_t offset) const {
    if (offset >= strings.sh_size) damaged("a name is missing");
    const char *begin = at<char>(strings.sh_offset, strings.sh_size) + offset;
    return {begin, strnlen(begin, strings.sh_size - offset)};
  }

 private:
  std::string_view code_;
  const Elf64_Shdr *sections_ = nullptr;
  size_t count_ = 0;
};

void put(char *place, int64_t value, int bytes, bool is_signed) {
  if (bytes == 4 && (is_signed ? value != static_cast<int32_t>(value) : value < 0 || value > 0xFFFFFFFFll))
    damaged("an address is out of reach");
  std::memcpy(place, &value, static_cast<size_t>(bytes));
}

bool is_loaded(const Elf64_Shdr &section) {
  return (section.sh_flags & SHF_ALLOC) && section.sh_type != SHT_X86_64_UNWIND && section.sh_size;
}

}  // namespace

Object::Object(std::string_view given, const std::vector<std::string> &imports) {
  std::vector<uint64_t> copied((given.size() + 7) / 8);  // tables are read in place, so it has to be aligned
  std::memcpy(copied.data(), given.data(), given.size());
  const Elf elf({reinterpret_cast<const char *>(copied.data()), given.size()});
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const Elf64_Shdr *table = nullptr;
  std::vector<uint64_t> place(elf.count(), 0);
  uint64_t end = 0, first_written = 0;
  for (bool written : {false, true}) {  // what code reads and runs, then on pages of its own what it writes
    if (written) first_written = end = aligned(end, page);
    for (size_t k = 0; k < elf.count(); ++k) {
      const Elf64_Shdr &section = elf.section(k);
      if (section.sh_type == SHT_SYMTAB) table = &section;
      if (!is_loaded(section) || bool(section.sh_flags & SHF_WRITE) != written) continue;
      if (section.sh_size > (1ull << 31) || section.sh_addralign > page) damaged("a section has no sensible size");
      place[k] = end = aligned(end, std::max<uint64_t>(section.sh_addralign, 1));
      end += section.sh_size;
    }
  }
  if (table == nullptr) damaged("it has no symbols");
  const uint64_t symbols = table->sh_size / sizeof(Elf64_Sym), stubs = aligned(end, page);
  size_ = stubs + aligned(symbols * STUB, page);
  void *mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) damaged("there is no memory for it");
  memory_ = static_cast<char *>(mapped);
  const auto base = reinterpret_cast<uint64_t>(memory_);
  try {
    const Elf64_Sym *symbol = elf.at<Elf64_Sym>(table->sh_offset, symbols);
    const Elf64_Shdr &strings = elf.section(table->sh_link);
    std::vector<uint64_t> value(symbols, 0);
    for (uint64_t k = 0; k < symbols; ++k) {
      uint64_t far = 0;  // where a stub leads
      if (symbol[k].st_shndx == SHN_UNDEF) {
        const std::string name = elf.name(strings, symbol[k].st_name);
        if (name.empty()) continue;
        if (std::find(imports.begin(), imports.end(), name) == imports.end()) damaged("it calls " + name + " unasked");
        far = reinterpret_cast<uint64_t>(dlsym(RTLD_DEFAULT, name.c_str()));
        if (far == 0) damaged("this process has no function " + name);
        value[k] = base + stubs + k * STUB;
      } else if (symbol[k].st_shndx == SHN_ABS) {
        value[k] = symbol[k].st_value;
      } else if (symbol[k].st_shndx < elf.count()) {
        far = value[k] = base + place[symbol[k].st_shndx] + symbol[k].st_value;
        const int type = ELF64_ST_TYPE(symbol[k].st_info), bind = ELF64_ST_BIND(symbol[k].st_info);
        if (type == STT_FUNC && bind != STB_LOCAL) functions_[elf.name(strings, symbol[k].st_name)] = value[k];
      } else {
        damaged("it has a symbol of an unknown kind");
      }
      static const unsigned char jump[] = {0xFF, 0x25, 2, 0, 0, 0, 0, 0};
      std::memcpy(memory_ + stubs + k * STUB, jump, sizeof jump);
      std::memcpy(memory_ + stubs + k * STUB + 8, &far, 8);
    }
    for (size_t k = 0; k < elf.count(); ++k) {
      const Elf64_Shdr &section = elf.section(k);
      if (is_loaded(section) && section.sh_type != SHT_NOBITS)
        std::memcpy(memory_ + place[k], elf.at<char>(section.sh_offset, section.sh_size), section.sh_size);
    }
    for (size_t k = 0; k < elf.count(); ++k) {
      const Elf64_Shdr &section = elf.section(k);
      if (section.sh_type == SHT_REL) damaged("it has relocations of an unknown kind");
      if (section.sh_type != SHT_RELA || !is_loaded(elf.section(section.sh_info))) continue;
      const Elf64_Shdr &target = elf.section(section.sh_info);
      const uint64_t count = section.sh_size / sizeof(Elf64_Rela);
      const Elf64_Rela *entry = elf.at<Elf64_Rela>(section.sh_offset, count);
      for (uint64_t r = 0; r < count; ++r) {
        const uint64_t number = ELF64_R_SYM(entry[r].r_info), type = ELF64_R_TYPE(entry[r].r_info);
        const int bytes = type == R_X86_64_64 || type == R_X86_64_PC64 ? 8 : 4;
        if (number >= symbols || target.sh_size < static_cast<uint64_t>(bytes) ||
            entry[r].r_offset > target.sh_size - static_cast<uint64_t>(bytes))
          damaged("a relocation lies outside of its section");
        char *where = memory_ + place[section.sh_info] + entry[r].r_offset;
        const auto here = reinterpret_cast<int64_t>(where);
        const auto there = static_cast<int64_t>(value[number]) + entry[r].r_addend;
        const auto slot = static_cast<int64_t>(base + stubs + number * STUB + 8) + entry[r].r_addend;
        switch (type) {
          case R_X86_64_NONE: break;
          case R_X86_64_64: put(where, there, 8, true); break;
          case R_X86_64_32: put(where, there, 4, false); break;
          case R_X86_64_32S: put(where, there, 4, true); break;
          case R_X86_64_PC32:
          case R_X86_64_PLT32: put(where, there - here, 4, true); break;
          case R_X86_64_PC64: put(where, there - here, 8, true); break;
          case R_X86_64_GOTPCREL:
          case R_X86_64_GOTPCRELX:
          case R_X86_64_REX_GOTPCRELX: put(where, slot - here, 4, true); break;
          default: damaged("it has a relocation of type " + std::to_string(type));
        }
      }
    }
    const uint64_t read_only = first_written;
    const bool done = (read_only == 0 || mprotect(memory_, read_only, PROT_READ | PROT_EXEC) == 0) &&
                      mprotect(memory_ + stubs, size_ - stubs, PROT_READ | PROT_EXEC) == 0;
    if (!done) damaged("the system does not allow code to be loaded");
  } catch (...) {
    munmap(memory_, size_);
    throw;
  }
}

Object::~Object() { munmap(memory_, size_); }

void *Object::function(const std::string &name) const {
  const auto found = functions_.find(name);
  if (found == functions_.end()) damaged("it has no function " + name);
  return reinterpret_cast<void *>(found->second);
}

}  // namespace aotkit
