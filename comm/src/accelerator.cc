#include "accelerator.h"

#include <dlfcn.h>

#include <charconv>
#include <map>
#include <mutex>
#include <utility>

#include "afd_comm/types.h"

namespace afd_comm {
namespace {

struct Kind {
  DeviceKind kind;
  const char* name;
};
constexpr Kind kKinds[] = {{DeviceKind::Cuda, "cuda"}, {DeviceKind::Hip, "hip"}};

std::shared_ptr<Accelerator> make(Device device) {
  switch (device.kind) {
    case DeviceKind::Cuda:
      return open_cuda(device.index);
    case DeviceKind::Hip:
      return open_hip(device.index);
    case DeviceKind::Cpu:
      break;
  }
  return open_cpu();
}

}  // namespace

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  for (const Kind& kind : kKinds) {
    const std::string prefix = std::string(kind.name) + ":";
    if (text.compare(0, prefix.size(), prefix) != 0) continue;
    int index = -1;
    const char* const end = text.data() + text.size();
    const auto result = std::from_chars(text.data() + prefix.size(), end, index);
    if (result.ec == std::errc() && result.ptr == end && index >= 0) return {kind.kind, index};
  }
  throw CommError("'" + text + "' is not a device; use cpu, cuda:N or hip:N");
}

std::string device_text(Device device) {
  for (const Kind& kind : kKinds)
    if (kind.kind == device.kind) return kind.name + (":" + std::to_string(device.index));
  return "cpu";
}

std::shared_ptr<Accelerator> open_accelerator(Device device) {
  // Never destroyed: at exit the driver may unload before our destructors run.
  static std::mutex& mutex = *new std::mutex;
  static auto& opened = *new std::map<std::pair<DeviceKind, int>, std::shared_ptr<Accelerator>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Accelerator>& known = opened[{device.kind, device.index}];
  if (known == nullptr) known = make(device);
  return known;
}

DriverLibrary::DriverLibrary(const char* file, const char* remedy)
    : file_(file), remedy_(remedy), handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr)
    throw CommError("cannot load " + std::string(file) + "; " + remedy + ", or use device cpu");
}

void* DriverLibrary::address(const char* symbol) const {
  void* const found = dlsym(handle_, symbol);
  if (found == nullptr)
    throw CommError(std::string(file_) + " has no " + symbol + ": it is too old; " + remedy_);
  return found;
}

DeviceMemory::DeviceMemory(std::shared_ptr<Accelerator> accelerator, std::size_t bytes)
    : accelerator_(std::move(accelerator)), memory_(accelerator_->allocate(bytes)) {}

DeviceMemory::~DeviceMemory() { accelerator_->free(memory_); }

Pinned::Pinned(std::shared_ptr<Accelerator> accelerator, void* host, std::size_t bytes)
    : accelerator_(std::move(accelerator)),
      host_(static_cast<uint8_t*>(host)),
      device_(static_cast<uint8_t*>(accelerator_->pin(host, bytes))) {}

Pinned::~Pinned() { accelerator_->unpin(host_); }

}  // namespace afd_comm
