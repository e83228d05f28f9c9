// glibc 2.32: std::shared_ptr asks whether it may count without atomic instructions. No, which is always right.
char __libc_single_threaded = 0;
