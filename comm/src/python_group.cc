// Python binding of Group.
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <vector>

#include "afd_comm/group.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

// The Python type Group: the group, the links it keeps alive, and room for what a call brings.
class PyGroup {
 public:
  PyGroup(nb::list links, int64_t timeout_us) : links_(links) {
    std::vector<Link*> pointers;
    for (const nb::handle link : links) pointers.push_back(nb::cast<Link*>(link));
    // Not interrupt(): the group may later be used on the main thread.
    group_.emplace(std::move(pointers), timeout_us, signals_pending);
    flags_.resize(size());
    rows_.resize(size());
    echoes_.resize(size());
    nb::list ok;
    for (std::size_t i = 0; i < size(); ++i) ok.append(nb::cast(Status::Ok));
    all_ok_ = nb::tuple(ok);
  }

  std::size_t size() const { return group_->size(); }

  nb::tuple broadcast(uint32_t slot, nb::list flags, int32_t layer, int32_t micro_batch,
                      int32_t rows, int32_t depth, int32_t kind, int32_t dtype, int64_t step,
                      nb::list parts, std::optional<nb::list> answer_to) {
    const Message message =
        message_of(slot, 0, layer, micro_batch, rows, depth, kind, dtype, step, parts);
    return post(message, flags, nullptr, answer_to, static_cast<uint64_t>(message.header.nbytes));
  }

  nb::tuple scatter(uint32_t slot, nb::list flags, int32_t layer, int32_t micro_batch,
                    nb::list rows, int32_t depth, int32_t kind, int32_t dtype, int64_t step,
                    nb::list parts, std::optional<nb::list> answer_to) {
    const Message message =
        message_of(slot, 0, layer, micro_batch, 0, depth, kind, dtype, step, parts);
    check_length(rows, "rows");
    uint64_t total = 0;
    for (std::size_t i = 0; i < size(); ++i) {
      const long n = PyLong_AsLong(PyList_GET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(i)));
      if (n == -1 && PyErr_Occurred()) throw nb::python_error();
      if (n < 0 || n > INT32_MAX) throw nb::value_error("rows must lie in [0, 2**31)");
      rows_[i] = static_cast<int32_t>(n);
      total += static_cast<uint64_t>(n) * static_cast<uint64_t>(message.header.nbytes);
    }
    return post(message, flags, rows_.data(), answer_to, total);
  }

 private:
  void check_length(nb::list list, const char* name) const {
    if (list.size() != size())
      throw nb::value_error((std::string(name) + " has " + std::to_string(list.size()) +
                             " entries, the group " + std::to_string(size()) + " links")
                                .c_str());
  }

  nb::tuple post(const Message& message, nb::list flags, const int32_t* rows,
                 std::optional<nb::list> answer_to, uint64_t bytes) {
    check_length(flags, "flags");
    for (std::size_t i = 0; i < size(); ++i)
      flags_[i] = as_u64(PyList_GET_ITEM(flags.ptr(), static_cast<Py_ssize_t>(i)));
    if (answer_to) {
      check_length(*answer_to, "answer_to");
      for (std::size_t i = 0; i < size(); ++i) {
        const auto* received = nb::cast<const Received*>((*answer_to)[i]);
        echoes_[i] =
            received == nullptr ? Echo{} : Echo{received->times.posted, received->times.arrived};
      }
    }
    const Group::PerLink per{flags_.data(), rows, answer_to ? echoes_.data() : nullptr};
    bool good = false;
    if (!group_->may_block() && bytes * size() <= kCopyWithGil) {
      good = group_->post(message, per);
    } else {
      const nb::gil_scoped_release release;
      good = group_->post(message, per);
    }
    // A signal handler that ran during the wait may have raised.
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (good) return all_ok_;
    nb::list out;
    for (std::size_t i = 0; i < size(); ++i) out.append(nb::cast(group_->statuses()[i]));
    return nb::tuple(out);
  }

  nb::list links_;
  std::optional<Group> group_;
  std::vector<uint64_t> flags_;
  std::vector<int32_t> rows_;
  std::vector<Echo> echoes_;
  nb::tuple all_ok_;  // what almost every call returns, made once
};

}  // namespace

void bind_group(nb::module_& m) {
  nb::class_<PyGroup>(m, "Group")
      .def(nb::init<nb::list, int64_t>(), "links"_a, nb::kw_only(), "timeout_us"_a)
      .def("__len__", &PyGroup::size)
      .def("broadcast", &PyGroup::broadcast, "slot"_a, "flags"_a, "layer"_a, "micro_batch"_a,
           "rows"_a, "depth"_a, "kind"_a, "dtype"_a, "step"_a, "parts"_a,
           "answer_to"_a = nb::none())
      .def("scatter", &PyGroup::scatter, "slot"_a, "flags"_a, "layer"_a, "micro_batch"_a, "rows"_a,
           "depth"_a, "kind"_a, "dtype"_a, "step"_a, "parts"_a, "answer_to"_a = nb::none());
}

}  // namespace afd_comm
