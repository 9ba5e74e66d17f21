/* Calls segments of compiled programs for a client at the other end of a pipe, see server.py.

   A request is a 32-bit code and what belongs to it, in the byte order that both sides share:
     'L' length path                                   loads a shared object; gives its number, or -1 and a text
     'C' library length name threads slots regions...  calls a function; gives its status and the memory it left
   Each region of memory is copied here with a guard before and behind it, and at an address that leaves the same rest
   modulo a page as the client's: code that takes an address to be aligned must meet one that is aligned no better. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, GUARD = 4096, MOST = 65536 };

static void *libraries[MOST];
static int loaded;

static void take(void *to, size_t count) {
  if (count && fread(to, 1, count, stdin) != count) exit(0); /* the client has gone */
}

static uint32_t number(void) {
  uint32_t value;
  take(&value, sizeof value);
  return value;
}

static uint64_t large(void) {
  uint64_t value;
  take(&value, sizeof value);
  return value;
}

static char *text(void) {
  uint32_t length = number();
  char *value = malloc(length + 1);
  take(value, length);
  value[length] = 0;
  return value;
}

static void give(const void *from, size_t count) {
  if (count && fwrite(from, 1, count, stdout) != count) exit(1);
}

static void give_number(int32_t value) { give(&value, sizeof value); }

static void give_text(const char *value) {
  give_number((int32_t)strlen(value));
  give(value, strlen(value));
}

static void load(void) {
  char *path = text();
  void *library = loaded < MOST ? dlopen(path, RTLD_NOW) : NULL;
  free(path);
  if (!library) {
    const char *why = dlerror();
    give_number(-1);
    give_text(why ? why : "too many libraries");
    return;
  }
  libraries[loaded] = library;
  give_number(loaded++);
}

struct region {
  uint64_t size;
  unsigned char *block, *data;
};

static unsigned char guard_byte(uint64_t position) { return (unsigned char)(0xA5 ^ position); }

static void take_region(struct region *region) {
  region->size = large();
  uint64_t rest = large();
  size_t whole = region->size + 2 * GUARD + 2 * PAGE;
  region->block = aligned_alloc(PAGE, (whole + PAGE - 1) / PAGE * PAGE);
  region->data = region->block + GUARD + rest;
  for (uint64_t k = 0; k < GUARD; k++) {
    region->data[-1 - (int64_t)k] = guard_byte(k);
    region->data[region->size + k] = guard_byte(k);
  }
  take(region->data, region->size);
}

static int is_damaged(const struct region *region) {
  for (uint64_t k = 0; k < GUARD; k++)
    if (region->data[-1 - (int64_t)k] != guard_byte(k) || region->data[region->size + k] != guard_byte(k)) return 1;
  return 0;
}

static void call(void) {
  uint32_t library = number();
  char *name = text();
  int32_t threads = (int32_t)number();
  uint32_t slot_count = number();
  uint64_t *slots = malloc(8 * (size_t)(slot_count + 1));
  take(slots, 8 * (size_t)slot_count);
  uint32_t region_count = number();
  struct region *regions = malloc(sizeof *regions * (size_t)(region_count + 1));
  for (uint32_t k = 0; k < region_count; k++) take_region(&regions[k]);
  for (uint32_t left = number(); left; left--) {
    uint32_t slot = number(), region = number();
    slots[slot] = (uint64_t)(uintptr_t)(regions[region].data + large());
  }
  int32_t (*function)(void *, int32_t) = (int32_t (*)(void *, int32_t))dlsym(libraries[library], name);
  if (!function) exit(2);
  give_number(function(slots, threads));
  for (uint32_t k = 0; k < region_count; k++) {
    give_number(is_damaged(&regions[k]));
    give(regions[k].data, regions[k].size);
    free(regions[k].block);
  }
  free(regions);
  free(slots);
  free(name);
}

int main(void) {
  for (;;) {
    uint32_t code = number();
    if (code == 'L') load();
    else if (code == 'C') call();
    else return 3;
    fflush(stdout);
  }
}
