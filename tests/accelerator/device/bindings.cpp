// The stand-in accelerator as PyTorch and Python see it: hooks, a generator of its own, a process group, and the
// module's functions.
#include "device.h"
#include "group.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace standin {
namespace {

// The same seed gives other numbers than on the CPU, as with CUDA.
constexpr uint64_t kSalt = 0x9E3779B97F4A7C15;

// Wraps a CPU generator for the CPU's kernels. Its state is not that of the CPU's default generator.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed)
      : GeneratorImpl({kDevice, 0}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator(seed ^ kSalt)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed ^ kSalt); }
  uint64_t current_seed() const override { return inner.current_seed() ^ kSalt; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "standin: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "standin: generators have no offset"); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(current_seed());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index == 0, "standin: there is one device, index ", int(index), " was asked for");
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { grow(storage, nbytes); }
};

}  // namespace

at::Generator new_generator() { return at::make_generator<Generator>(c10::default_rng_seed_val); }

at::Generator& default_generator() {
  static auto* generator = new at::Generator(new_generator());
  return *generator;
}

at::Generator cpu_generator(const std::optional<at::Generator>& given) {
  const auto& generator = given && given->defined() ? *given : default_generator();
  TORCH_CHECK(generator.device().type() == kDevice, "Expected a 'standin' device type for generator but found '",
              generator.device(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace standin;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_memory();
  register_streams();
  module.def("seed", [](uint64_t seed) { default_generator().set_current_seed(seed); });
  module.def("default_generator", [] { return default_generator(); });
  module.def("in_bad_fork", in_bad_fork);
  module.def("synchronizations", [] { return statistics().synchronizations; });
  module.def("group", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(std::move(gloo)));
  });
  module.def("pinned_bytes", [] { return statistics().pinned; });
}
