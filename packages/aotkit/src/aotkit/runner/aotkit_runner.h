/* Runs packages of aotkit.aot_compile in a process without Python.
 *
 *     aotkit_package *package;
 *     if (aotkit_load("bert.aotkit", NULL, &package)) { puts(aotkit_last_error()); exit(1); }
 *     aotkit_value in[2] = {...}, out[1];
 *     if (aotkit_run(package, in, 2, out, 1)) ...
 *     ... out[0].tensor.data ...
 *     aotkit_release(&out[0]);
 *     aotkit_unload(package);
 *
 * A package holds native code, which runs in this process: load only files that you trust. With a signing key nothing
 * of a file is looked at before its signature holds. aotkit_run may be called by any number of threads at once.
 */
#ifndef AOTKIT_RUNNER_H
#define AOTKIT_RUNNER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AOTKIT_RUNNER_VERSION 1
#define AOTKIT_PUBLIC __attribute__((visibility("default")))

typedef struct aotkit_package aotkit_package;

/* What a function returns. aotkit_last_error() says more. */
typedef enum {
  AOTKIT_OK = 0,
  AOTKIT_BAD_FILE = 1,     /* no package, damaged, or without the signature */
  AOTKIT_WRONG_PLACE = 2,  /* made for another torch, system, processor or device */
  AOTKIT_UNSUPPORTED = 3,  /* holds what this runner does not do; Python's loader may */
  AOTKIT_BAD_ARGUMENT = 4, /* a call that the package was not compiled for */
  AOTKIT_FAILED = 5        /* an operator or a kernel failed, as it does in eager mode */
} aotkit_status;

/* Numbers of element types are those of torch's c10::ScalarType. */
typedef enum {
  AOTKIT_UINT8 = 0, AOTKIT_INT8 = 1, AOTKIT_INT16 = 2, AOTKIT_INT32 = 3, AOTKIT_INT64 = 4, AOTKIT_FLOAT16 = 5,
  AOTKIT_FLOAT32 = 6, AOTKIT_FLOAT64 = 7, AOTKIT_COMPLEX64 = 9, AOTKIT_COMPLEX128 = 10, AOTKIT_BOOL = 11,
  AOTKIT_BFLOAT16 = 15
} aotkit_dtype;

/* Memory of the CPU. Strides count elements. */
typedef struct {
  void *data;
  int32_t dtype;
  int32_t dim;
  const int64_t *sizes;
  const int64_t *strides;
} aotkit_tensor;

typedef enum { AOTKIT_NOTHING = 0, AOTKIT_TENSOR = 1, AOTKIT_INTEGER = 2, AOTKIT_CONSTANT = 3 } aotkit_kind;

/* An argument or a result. Memory of arguments belongs to the caller. Results own theirs until aotkit_release, unless
 * the model returns an argument or a view of one. AOTKIT_CONSTANT: a result that is the same in every call; its JSON
 * text is in the description. */
typedef struct {
  int32_t kind;
  int64_t integer;
  aotkit_tensor tensor;
  void *owner;
} aotkit_value;

/* Maps the weights, looks whether the file is whole, and loads the code. `signing_key`: the text that aot_compile was
 * given, or NULL. */
AOTKIT_PUBLIC aotkit_status aotkit_load(const char *path, const char *signing_key, aotkit_package **package);
AOTKIT_PUBLIC void aotkit_unload(aotkit_package *package);

/* Arguments are in the order of the description's "arguments", results in that of the leaves of its "outputs". */
AOTKIT_PUBLIC size_t aotkit_num_inputs(const aotkit_package *package);
AOTKIT_PUBLIC size_t aotkit_num_outputs(const aotkit_package *package);
/* The package's manifest as JSON: arguments, sizes and their ranges, results, versions. Lives as long as the package. */
AOTKIT_PUBLIC const char *aotkit_description(const aotkit_package *package);
/* The place of a result in the structure that the model returns: "logits", "0.hidden". */
AOTKIT_PUBLIC const char *aotkit_output_name(const aotkit_package *package, size_t position);

AOTKIT_PUBLIC aotkit_status aotkit_run(aotkit_package *package, const aotkit_value *inputs, size_t num_inputs,
                                       aotkit_value *outputs, size_t num_outputs);
AOTKIT_PUBLIC void aotkit_release(aotkit_value *value);

/* Of the last call in this thread that did not return AOTKIT_OK. */
AOTKIT_PUBLIC const char *aotkit_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
