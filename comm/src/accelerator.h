// What the accelerator_*.cc files share: loading a driver library, and their constructors.
#pragma once

#include <string>

#include "afd_comm/accelerator.h"

namespace afd_comm {

std::shared_ptr<Accelerator> open_cpu();
std::shared_ptr<Accelerator> open_cuda(int index);
std::shared_ptr<Accelerator> open_hip(int index);

// A shared library of the system, never unloaded: drivers keep threads.
class DriverLibrary {
 public:
  // Throws CommError with `remedy` when it cannot be loaded.
  DriverLibrary(const char* file, const char* remedy);

  template <typename Function>
  void find(Function*& function, const char* symbol) const {
    function = reinterpret_cast<Function*>(address(symbol));
  }

 private:
  void* address(const char* symbol) const;
  const char* file_;
  const char* remedy_;
  void* handle_;
};

}  // namespace afd_comm
