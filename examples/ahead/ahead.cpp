// Runs the package of `ahead.py`, whose path comes first; the others are libraries with extops' operators.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>

int main(int count, char** arguments) {
  for (int number = 2; number < count; ++number) {
    if (dlopen(arguments[number], RTLD_NOW) == nullptr) {
      std::cerr << dlerror() << "\n";
      return 1;
    }
  }
  c10::InferenceMode without_gradients;
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const auto tokens = torch::arange(40).view({2, 20});
  const auto lengths = torch::tensor({20, 5}, torch::kInt64);
  const auto scores = model.run({tokens, lengths})[0].contiguous();
  std::cout.precision(9);
  for (int64_t place = 0; place < scores.numel(); ++place) {
    std::cout << scores.data_ptr<float>()[place] << "\n";
  }
}
