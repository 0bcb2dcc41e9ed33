// Python binding of Message.
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

// `parts`: a list of (offset, ptr, nbytes).
void read_parts(nb::list parts, Message& message) {
  message.part_count = parts.size();
  if (message.part_count > kMaxParts)
    throw nb::value_error(("a message has at most " + std::to_string(kMaxParts) + " parts; got " +
                           std::to_string(message.part_count))
                              .c_str());
  uint64_t total = 0;
  for (std::size_t i = 0; i < message.part_count; ++i) {
    PyObject* item = PyList_GET_ITEM(parts.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3)
      throw nb::type_error("each part must be a tuple (offset, ptr, nbytes) of ints");
    Part& part = message.parts[i];
    part.offset = as_u64(PyTuple_GET_ITEM(item, 0));
    part.data =
        reinterpret_cast<const void*>(static_cast<uintptr_t>(as_u64(PyTuple_GET_ITEM(item, 1))));
    part.nbytes = as_u64(PyTuple_GET_ITEM(item, 2));
    if (part.data == nullptr && part.nbytes != 0)
      throw nb::value_error("a part with bytes has a null pointer");
    total += part.nbytes;  // may wrap; then one part exceeds every slot, and the link refuses it
  }
  message.header.nbytes = static_cast<int64_t>(total);
}

Message construct(uint32_t slot, nb::list parts, nb::bytes user, uint32_t count, uint32_t whole) {
  Message message;
  message.slot = slot;
  message.header.count = count;
  if (user.size() > sizeof message.header.user)
    throw nb::value_error(("user has " + std::to_string(user.size()) + " bytes; a header holds " +
                           std::to_string(sizeof message.header.user))
                              .c_str());
  std::memcpy(message.header.user.data(), user.c_str(), user.size());
  read_parts(parts, message);
  if (whole > message.part_count) throw nb::value_error("whole exceeds the number of parts");
  message.whole = whole;
  return message;
}

nb::list parts_of(const Message& message) {
  nb::list out;
  for (std::size_t i = 0; i < message.part_count; ++i) {
    const Part& part = message.parts[i];
    out.append(nb::make_tuple(part.offset, reinterpret_cast<uintptr_t>(part.data), part.nbytes));
  }
  return out;
}

std::string text(const Message& message) {
  return "Message(slot=" + std::to_string(message.slot) +
         ", user=" + user_text(message.header.user) +
         ", count=" + std::to_string(message.header.count) +
         ", nbytes=" + std::to_string(message.header.nbytes) +
         ", parts=" + std::to_string(message.part_count) + ")";
}

}  // namespace

std::string user_text(const std::array<uint64_t, kUserWords>& user) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  const auto* bytes = reinterpret_cast<const uint8_t*>(user.data());
  for (std::size_t i = 0; i < sizeof user; ++i) {
    out += digits[bytes[i] >> 4];
    out += digits[bytes[i] & 15];
  }
  return out;
}

void bind_message(nb::module_& m) {
  m.attr("USER_BYTES") = sizeof(Header::user);
  nb::class_<Message>(m, "Message", nb::is_final())
      .def(nb::new_(&construct), "slot"_a, "parts"_a, "user"_a = nb::bytes("", 0), "count"_a = 0,
           "whole"_a = 0)
      .def_prop_ro("slot", [](const Message& message) { return message.slot; })
      .def_prop_ro("parts", &parts_of)
      .def_prop_ro("user", [](const Message& message) { return user_bytes(message.header.user); })
      .def_prop_ro("count", [](const Message& message) { return message.header.count; })
      .def_prop_ro("nbytes", [](const Message& message) { return message.header.nbytes; })
      .def("__repr__", &text);
}

}  // namespace afd_comm
