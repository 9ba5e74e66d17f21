/* A server of one package: serve PACKAGE CALLS THREADS ROUNDS [KEY]
 *
 * CALLS is a file of calls, each with its arguments and with the results that it is to give, bit for bit. Every thread
 * makes every call so many times. Prints how many results differ, and whether Python is in the process.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "aotkit_runner.h"

#define MOST 64

typedef struct {
  aotkit_value values[MOST];
  size_t nbytes[MOST];
  size_t count;
} values;

typedef struct {
  values given, wanted;
} call;

static aotkit_package *package;
static call *calls;
static int num_calls, rounds;

static void must(size_t done, const char *what) {
  if (!done) {
    fprintf(stderr, "%s\n", what);
    exit(2);
  }
}

static int64_t number(FILE *file) {
  int64_t value = 0;
  must(fread(&value, 8, 1, file), "the file of calls is cut short");
  return value;
}

static void read_values(FILE *file, values *read) {
  read->count = (size_t)number(file);
  must(read->count <= MOST, "too many values");
  for (size_t k = 0; k < read->count; ++k) {
    aotkit_value *value = &read->values[k];
    memset(value, 0, sizeof *value);
    value->kind = (int32_t)number(file);
    if (value->kind == AOTKIT_INTEGER) value->integer = number(file);
    if (value->kind != AOTKIT_TENSOR) continue;
    aotkit_tensor *tensor = &value->tensor;
    tensor->dtype = (int32_t)number(file);
    tensor->dim = (int32_t)number(file);
    int64_t *layout = malloc(2 * sizeof(int64_t) * (size_t)(tensor->dim + 1));
    for (int d = 0; d < 2 * tensor->dim; ++d) layout[d] = number(file);
    tensor->sizes = layout;
    tensor->strides = layout + tensor->dim;
    read->nbytes[k] = (size_t)number(file);
    tensor->data = aligned_alloc(64, (read->nbytes[k] + 64) / 64 * 64);
    must(fread(tensor->data, 1, read->nbytes[k], file) == read->nbytes[k], "the file of calls is cut short");
  }
}

static int same(const aotkit_value *found, const aotkit_value *wanted, size_t nbytes) {
  if (found->kind != wanted->kind) return 0;
  if (found->kind == AOTKIT_INTEGER) return found->integer == wanted->integer;
  if (found->kind != AOTKIT_TENSOR) return 1;
  const aotkit_tensor *one = &found->tensor, *other = &wanted->tensor;
  if (one->dtype != other->dtype || one->dim != other->dim) return 0;
  const size_t layout = sizeof(int64_t) * (size_t)one->dim;
  if (memcmp(one->sizes, other->sizes, layout) || memcmp(one->strides, other->strides, layout)) return 0;
  return memcmp(one->data, other->data, nbytes) == 0;
}

static void *serve(void *unused) {
  (void)unused;
  intptr_t wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    for (int k = 0; k < num_calls; ++k) {
      call *made = &calls[k];
      aotkit_value results[MOST];
      if (aotkit_run(package, made->given.values, made->given.count, results, made->wanted.count)) {
        fprintf(stderr, "%s\n", aotkit_last_error());
        ++wrong;
        continue;
      }
      for (size_t r = 0; r < made->wanted.count; ++r) {
        wrong += !same(&results[r], &made->wanted.values[r], made->wanted.nbytes[r]);
        aotkit_release(&results[r]);
      }
    }
  }
  return (void *)wrong;
}

static int python_is_here(void) {
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[4096];
  int found = 0;
  while (fgets(line, sizeof line, maps)) found |= strstr(line, "python") != NULL && strstr(line, ".so") != NULL &&
      (strstr(line, "libpython") != NULL || strstr(line, "libtorch_python") != NULL);
  fclose(maps);
  return found;
}

int main(int count, char **words) {
  must(count >= 5, "serve PACKAGE CALLS THREADS ROUNDS [KEY]");
  const int status = aotkit_load(words[1], count > 5 ? words[5] : NULL, &package);
  if (status) {
    printf("refused %d %s\n", status, aotkit_last_error());
    return 0;
  }
  FILE *file = fopen(words[2], "rb");
  must(file != NULL, "there is no file of calls");
  num_calls = (int)number(file);
  calls = calloc((size_t)num_calls, sizeof(call));
  for (int k = 0; k < num_calls; ++k) {
    read_values(file, &calls[k].given);
    read_values(file, &calls[k].wanted);
  }
  const int num_threads = atoi(words[3]);
  rounds = atoi(words[4]);
  pthread_t threads[MOST];
  intptr_t wrong = 0;
  for (int k = 0; k < num_threads; ++k) must(!pthread_create(&threads[k], NULL, serve, NULL), "no thread");
  for (int k = 0; k < num_threads; ++k) {
    void *part;
    pthread_join(threads[k], &part);
    wrong += (intptr_t)part;
  }
  printf("%zu arguments, results", aotkit_num_inputs(package));
  for (size_t k = 0; k < aotkit_num_outputs(package); ++k) printf(" %s", aotkit_output_name(package, k));
  printf("\n%ld of %d results differ, Python is %s\n", (long)wrong, num_threads * rounds * num_calls, python_is_here() ? "here" : "absent");
  aotkit_unload(package);
  return 0;
}
