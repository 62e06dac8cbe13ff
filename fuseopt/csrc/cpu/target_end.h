// Ends what a file compiles for another instruction set than the library's own. Included where that ends, any number of
// times.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
