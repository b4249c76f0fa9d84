// Blocks that torch takes from the C allocator, so that they go where one of their size was before.
//
// Torch asks for whole cache lines by posix_memalign.  glibc (2.36) answers that from a free block at least 96 bytes
// longer than asked, cuts off what it does not need, and small blocks that live on come to lie there; when the large
// one is freed, its hole is just too small for the next of its size.  A step makes the same blocks again and again: a
// Llama of 110M parameters left 91 holes of 3 MiB in each, and who gives them back pays 2 us a page to have them again.
// A plain malloc takes such a hole as it is, and its answer is at a whole line where all blocks are whole lines long.
//
// So the address by which torch's allocator calls posix_memalign is exchanged for that of the function below, which may
// be called in its place: what it returns is freed by free.  Where the address is not found (another allocator, torch
// built in one piece) all stays as it was.
#include "heap.h"
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace offloadz {
namespace {

constexpr size_t kLine = 64, kPage = 4096;
constexpr size_t kLeast = size_t(256) << 10; // smaller ones find their places
constexpr size_t kMost = SIZE_MAX / 2;
// Blocks that begin at the same place of a page get in each other's way (docs/log.md): nine lines apart, less the word
// that the allocator keeps before each.
constexpr size_t kApart = 9 * kLine - sizeof(size_t);

int aligned_block(void **out, size_t alignment, size_t num_bytes) {
  if (alignment > kLine || num_bytes < kLeast || num_bytes > kMost) return posix_memalign(out, alignment, num_bytes);
  size_t longer = (num_bytes + kPage - 1) / kPage * kPage + kApart;
  void *block = malloc(longer);
  if (block && uintptr_t(block) % alignment == 0) {
    *out = block;
    return 0;
  }
  free(block);
  return posix_memalign(out, alignment, longer);
}

// What the dynamic section of a loaded object says.
struct Object {
  const char *names = nullptr;
  const ElfW(Sym) *symbols = nullptr;
  ElfW(Addr) tables[2] = { 0, 0 }; // relocations of calls, and all others
  size_t num_bytes[2] = {0, 0};

  explicit Object(const ElfW(Dyn) * at) {
    for (; at->d_tag != DT_NULL; ++at)
      switch (at->d_tag) {
      case DT_STRTAB:
        names = reinterpret_cast<const char *>(at->d_un.d_ptr);
        break;
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym) *>(at->d_un.d_ptr);
        break;
      case DT_JMPREL:
        tables[0] = at->d_un.d_ptr;
        break;
      case DT_PLTRELSZ:
        num_bytes[0] = at->d_un.d_val;
        break;
      case DT_RELA:
        tables[1] = at->d_un.d_ptr;
        break;
      case DT_RELASZ:
        num_bytes[1] = at->d_un.d_val;
        break;
      }
  }
};

// Where an object keeps the address of a function it calls; null if it does not call it.
void **address_of(const dl_phdr_info &info, const Object &object, const char *name) {
  for (int which = 0; which < 2; ++which) {
    auto *entries = reinterpret_cast<const ElfW(Rela) *>(object.tables[which]);
    for (size_t i = 0; i < object.num_bytes[which] / sizeof(ElfW(Rela)); ++i) {
      size_t symbol = entries[i].r_info >> 32; // of 64 bits; 0 for what names nothing
      if (symbol && !std::strcmp(object.names + object.symbols[symbol].st_name, name) && !entries[i].r_addend)
        return reinterpret_cast<void **>(info.dlpi_addr + entries[i].r_offset);
    }
  }
  return nullptr;
}

// Writes an address, also where the loader has made a page of them read-only.
bool exchange(void **at, void *address, bool read_only) {
  size_t page = size_t(sysconf(_SC_PAGESIZE));
  void *start = reinterpret_cast<void *>(uintptr_t(at) / page * page);
  if (read_only && mprotect(start, page, PROT_READ | PROT_WRITE)) return false;
  __atomic_store_n(at, address, __ATOMIC_RELEASE); // other threads call meanwhile
  if (read_only) mprotect(start, page, PROT_READ);
  return true;
}

int visit(dl_phdr_info *info, size_t, void *done) {
  const char *file = std::strrchr(info->dlpi_name, '/');
  if (!file || std::strncmp(file, "/libc10.so", 10)) return 0;
  const ElfW(Dyn) *dynamic = nullptr;
  uintptr_t from = 0, to = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) &part = info->dlpi_phdr[i];
    if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn) *>(info->dlpi_addr + part.p_vaddr);
    if (part.p_type == PT_GNU_RELRO) from = info->dlpi_addr + part.p_vaddr, to = from + part.p_memsz;
  }
  if (!dynamic) return 0;
  void **at = address_of(*info, Object(dynamic), "posix_memalign");
  bool read_only = uintptr_t(at) >= from && uintptr_t(at) < to;
  *static_cast<bool *>(done) = at && exchange(at, reinterpret_cast<void *>(&aligned_block), read_only);
  return 1;
}

} // namespace

bool fill_holes() {
  bool done = false;
  if (sizeof(void *) == 8) dl_iterate_phdr(visit, &done);
  return done;
}

} // namespace offloadz
