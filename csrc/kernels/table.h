// An operator with kernels of its own states its tensors once, in a table with a row for each:
//
//   IN(name, dimensions...)         an input; contiguous when the kernel gets it
//   UPSTREAM(name, dimensions...)   what may be absent. For a kernel that gets the table's struct: gradients of two
//                                   dimensions, of any strides, in the first rows
//   OUT(name, dimensions...)        a new tensor for a result
//
// The dimensions are expressions of the operator's sizes, which are listed once, too. From these come the struct that
// the kernels get, the operator's schema, and what the bindings check and allocate.
#pragma once

#include <cstdint>

// Null where the gradient is absent. Strides are in elements, 0 for an expanded gradient.
struct Upstream {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
};

#define EXTOPS_IN_FIELD(name, ...) const void* name;
#define EXTOPS_UPSTREAM_FIELD(name, ...) Upstream name;
#define EXTOPS_OUT_FIELD(name, ...) void* name;

#define EXTOPS_IN_TEXT(name, ...) "Tensor " #name "[" #__VA_ARGS__ "]; "
#define EXTOPS_UPSTREAM_TEXT(name, ...) "Tensor? " #name "[" #__VA_ARGS__ "]; "
#define EXTOPS_OUT_TEXT(name, ...) "-> Tensor " #name "[" #__VA_ARGS__ "]; "

#define EXTOPS_IN_VISIT(name, ...) visitor.in(arguments.name, #name, {__VA_ARGS__});
#define EXTOPS_UPSTREAM_VISIT(name, ...) visitor.upstream(arguments.name, #name, {__VA_ARGS__});
#define EXTOPS_OUT_VISIT(name, ...) visitor.out(arguments.name, #name, {__VA_ARGS__});

#define EXTOPS_NOTHING(...)
#define EXTOPS_COUNT(...) +1
#define EXTOPS_TEXT(...) #__VA_ARGS__

// `SIZES` are the names in `Sizes`. Each field has 64 bits, so that the binding in Python can fill the struct from the
// text of the rows.
#define EXTOPS_ARGUMENTS(Name, Sizes, SIZES, TABLE)                                                    \
  struct Name {                                                                                        \
    Sizes sizes;                                                                                       \
    TABLE(EXTOPS_IN_FIELD, EXTOPS_UPSTREAM_FIELD, EXTOPS_OUT_FIELD)                                    \
                                                                                                       \
    static constexpr const char* kSizes = EXTOPS_TEXT(SIZES);                                          \
    static constexpr const char* kRows = TABLE(EXTOPS_IN_TEXT, EXTOPS_UPSTREAM_TEXT, EXTOPS_OUT_TEXT); \
    static constexpr int kInputs = 0 TABLE(EXTOPS_COUNT, EXTOPS_COUNT, EXTOPS_NOTHING);                \
    static constexpr int kResults = 0 TABLE(EXTOPS_NOTHING, EXTOPS_NOTHING, EXTOPS_COUNT);             \
                                                                                                       \
    template <class Visitor>                                                                           \
    static void visit(Name& arguments, Visitor& visitor) {                                             \
      [[maybe_unused]] const auto& [SIZES] = arguments.sizes;                                          \
      TABLE(EXTOPS_IN_VISIT, EXTOPS_UPSTREAM_VISIT, EXTOPS_OUT_VISIT)                                  \
    }                                                                                                  \
  };
