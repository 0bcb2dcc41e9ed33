// A fake libamdhip64 without a GPU: device memory is host memory, and each launch calls a callback.
#include <stdlib.h>
#include <string.h>

typedef int Error;
typedef void (*Launch)(const void* code, const char* name, const unsigned* sizes, void** arguments);
typedef struct {
  const void* code;
  char name[512];
} Function;

static Launch launch;
void stand_in_set_launch(Launch callback) { launch = callback; }

Error hipModuleLoadData(void** module, const void* code) { return *module = (void*)code, 0; }
Error hipModuleUnload(void* module) { return 0; }
Error hipModuleGetFunction(void** out, void* module, const char* name) {
  Function* function = calloc(1, sizeof *function);
  function->code = module;
  strncpy(function->name, name, sizeof function->name - 1);
  return *out = function, 0;
}
Error hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, void* stream, void** arguments, void** x) {
  const Function* function = f;
  const unsigned sizes[7] = {gx, gy, gz, bx, by, bz, shared};
  if (!launch) return 1;
  launch(function->code, function->name, sizes, arguments);
  return 0;
}

Error hipMalloc(void** out, size_t size) { return *out = malloc(size), 0; }
Error hipFree(void* pointer) { return free(pointer), 0; }
Error hipMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return memmove(to, from, size), 0;
}
Error hipMemsetD16Async(void* to, unsigned short value, size_t count, void* stream) {
  for (size_t i = 0; i < count; i++) ((unsigned short*)to)[i] = value;
  return 0;
}
Error hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  for (size_t i = 0; i < count; i++) ((int*)to)[i] = value;
  return 0;
}
Error hipHostRegister(void* pointer, size_t size, unsigned flags) { return 0; }
Error hipHostUnregister(void* pointer) { return 0; }
Error hipHostGetDevicePointer(void** out, void* host, unsigned flags) { return *out = host, 0; }
Error hipSetDevice(int device) { return 0; }
Error hipGetDevice(int* device) { return *device = 0, 0; }
Error hipGetDeviceCount(int* count) { return *count = 1, 0; }
Error hipDeviceSynchronize(void) { return 0; }
Error hipStreamCreate(void** stream) { return *stream = 0, 0; }
Error hipStreamDestroy(void* stream) { return 0; }
Error hipStreamSynchronize(void* stream) { return 0; }
Error hipStreamWaitEvent(void* stream, void* event, unsigned flags) { return 0; }
Error hipEventCreateWithFlags(void** event, unsigned flags) { return *event = (void*)1, 0; }
Error hipEventDestroy(void* event) { return 0; }
Error hipEventRecord(void* event, void* stream) { return 0; }
Error hipEventSynchronize(void* event) { return 0; }
const char* hipGetErrorName(Error error) { return "stand-in"; }
